"""Joins finished parts into OUTPUT.bin, OUTPUT.idx and, of conversations, OUTPUT.loss.bin.

The tokens of a part are copied as they lie, through one buffer, and their digest is taken on the way. Which documents
are left out is known before the first byte is copied.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError, first_names
from data_pipeline.prepare.parts import PartStore, RemainingPart
from data_pipeline.storage.indexed_writer import IndexedWriter
from data_pipeline.storage.loss_file import LossWriter, loss_path
from data_pipeline.storage.meta import meta_path

_BUFFER_TOKENS = 1 << 20
_INDEX_BYTES = 20  # of a document
LISTED_ROWS = 10_000  # of those that are left out


class JoinedParts(NamedTuple):
    """The output that the parts have become."""

    token_count: int
    document_count: int
    bin_sha256: str
    idx_sha256: str
    loss_sha256: str | None
    loss_token_count: int | None
    bad_rows: int
    first_bad_rows: list[str]  # sentences about some of them


class _Survey(NamedTuple):
    """The facts of all parts that are needed before the first of them is copied."""

    documents: int
    token_bytes: int
    bad_rows: int
    refused: set[int]  # documents, numbered over all parts, of which a piece could not be encoded


def join_parts(
    store: PartStore,
    part_count: int,
    dtype: np.dtype[Any],
    specs: Sequence[str],
    *,
    has_loss: bool,
    report: Callable[[int, int], None],
) -> JoinedParts:
    """Writes the output without its metadata; that of an older output is removed just before it is replaced.

    `report` is told the documents and tokens of each part that has been copied. Raises DataError if a part is damaged,
    if the disk has no room for the output, or if there is no document in it.
    """
    output, survey = store.output, _survey(store, part_count, dtype.itemsize + has_loss)
    _check_documents(store, specs, survey)
    _check_space(output, survey)
    writer, mask = IndexedWriter(output, dtype), LossWriter(output) if has_loss else None
    first, sentences = 0, list[str]()
    try:
        with writer, mask or nullcontext():
            for number in range(part_count):
                facts = store.facts(number)
                part = facts.without({document - first for document in survey.refused})
                with store.open_tokens(number, facts.token_count * dtype.itemsize) as stream:
                    _append_tokens(writer, stream, part)
                if mask is not None:
                    with store.open_tokens(number, facts.token_count, loss=True) as stream:
                        for block in _blocks(stream, part.stretches, np.dtype(np.uint8)):
                            mask.append(block)
                first += len(facts.document_ends)
                sentences += facts.sentences[: LISTED_ROWS - len(sentences)]
                report(len(part.document_ends), part.token_count)
            meta_path(output).unlink(missing_ok=True)
            loss_path(output).unlink(missing_ok=True)
    except OSError as error:
        error.filename = error.filename or f"{output}.bin"  # a full disk is reported without a name
        raise
    return JoinedParts(
        writer.token_count,
        writer.document_count,
        writer.bin_sha256,
        writer.idx_sha256,
        mask.sha256 if mask else None,
        mask.count if mask else None,
        survey.bad_rows,
        sentences,
    )


def _survey(store: PartStore, part_count: int, token_bytes: int) -> _Survey:
    documents = tokens = bad_rows = 0
    refused = set[int]()
    for number in range(part_count):
        facts = store.facts(number)
        refused.update((facts.refused + documents).tolist())
        documents += len(facts.document_ends)
        tokens += facts.token_count
        bad_rows += facts.bad_rows
    return _Survey(documents, tokens * token_bytes, bad_rows + len(refused), refused)


def _check_documents(store: PartStore, specs: Sequence[str], survey: _Survey) -> None:
    """Raises DataError if no document is left of those in the sources `specs`."""
    if survey.documents > len(survey.refused):
        return
    if survey.bad_rows:
        raise DataError(f"{first_names(specs)}: none of the {survey.bad_rows:,} rows can be used")
    store.remove()
    hold = "holds" if len(specs) == 1 else "hold"
    raise DataError(f"{first_names(specs)} {hold} no text at all: give at least one document with text")


def _check_space(output: Path, survey: _Survey) -> None:
    """Raises DataError if the disk has no room for the output beside the parts, which stay until it is complete."""
    needed, free = survey.token_bytes + survey.documents * _INDEX_BYTES, shutil.disk_usage(output.parent).free
    if needed > free:
        raise DataError(
            f"{output}.bin and .idx take {needed:,} bytes beside the finished parts, but {free:,} are free on their "
            "disk: free some space and give the same command"
        )


def _append_tokens(writer: IndexedWriter, stream: BinaryIO, part: RemainingPart) -> None:
    position = ended = 0
    for block in _blocks(stream, part.stretches, writer.dtype):
        inside = int(part.document_ends.searchsorted(position + len(block), "right"))
        writer.append(block, part.document_ends[ended:inside] - position)
        position, ended = position + len(block), inside
    writer.append(np.empty(0, writer.dtype), part.document_ends[ended:] - position)  # documents without a token


def _blocks(stream: BinaryIO, stretches: Sequence[tuple[int, int]], dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yields stretches of the elements in a file, block by block; each is valid until the next one is asked for."""
    buffer = np.empty(_BUFFER_TOKENS, dtype)
    for begin, end in stretches:
        stream.seek(begin * dtype.itemsize)
        for place in range(begin, end, _BUFFER_TOKENS):
            block = buffer[: min(end - place, _BUFFER_TOKENS)]
            if stream.readinto(block.data) != block.nbytes:  # type: ignore[attr-defined]
                raise DataError(f"{stream.name} became shorter while it was read: run prepare again")
            yield block
