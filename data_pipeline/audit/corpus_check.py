"""Reads every byte of prepared data: digests, the index, ids, marks of loss. A run trusts what its metadata says."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.samples.corpus_checks import check_loss_mask
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.loss_file import loss_path
from data_pipeline.storage.meta import CorpusMeta, read_meta
from data_pipeline.storage.paths import with_ending

_AT_ONCE = 1 << 22  # tokens


@dataclass(frozen=True)
class CorpusFindings:
    """The result of a check; `problems` are sentences."""

    prefix: Path
    document_count: int
    token_count: int
    largest_id: int
    has_metadata: bool  # without, there are no digests and no vocabulary to hold the files against
    problems: tuple[str, ...]


def bytes_to_check(prefix: Path) -> int:
    """Returns how many bytes `check_corpus` reads. Raises DataError if a file is missing or its header is damaged."""
    return sum(path.stat().st_size for path in _files_of(prefix))


def check_corpus(prefix: Path, advance: Callable[[int], None], vocab_size: int | None = None) -> CorpusFindings:
    """Holds the files of a corpus against each other and its metadata; `advance` is told of bytes as they are read.

    Ids must lie below `vocab_size` too, if it is given.

    Raises DataError if a file is missing.
    """
    bin_path, idx_path, *_ = _files_of(prefix)
    problems: list[str] = []
    try:
        meta = read_meta(prefix)
    except DataError as error:
        meta = None
        problems.append(str(error))
    try:
        corpus = IndexedTokens(prefix)
        corpus.check()
    except DataError as error:  # its tokens have no known type or end
        return CorpusFindings(prefix, 0, 0, 0, meta is not None, (*problems, str(error)))
    if not problems:  # metadata that is not readable names no mask
        try:
            check_loss_mask(corpus, meta)
        except DataError as error:
            problems.append(str(error))
    digest = hashlib.sha256()
    lowest, highest = 0, 0
    for first in range(0, corpus.token_count, _AT_ONCE):
        tokens = corpus.read(first, min(first + _AT_ONCE, corpus.token_count))
        lowest, highest = min(lowest, int(tokens.min())), max(highest, int(tokens.max()))
        digest.update(tokens.data)
        advance(tokens.nbytes)
    problems += _wrong_ids(corpus, meta, vocab_size, lowest, highest)
    if corpus.has_loss_mask:
        problems += _wrong_marks(loss_path(prefix), meta, advance)
    if meta is not None:
        promised = (meta.token_count, meta.document_count, meta.dtype)
        if promised != (corpus.token_count, len(corpus), str(corpus.dtype)):
            problems.append(f"{prefix}.meta.json describes another corpus: {meta.document_count:,} documents")
        if digest.hexdigest() != meta.sha256:
            problems.append(f"{bin_path} is not the file that was written: its SHA-256 differs from the metadata's")
        if corpus.index_digest() != meta.idx_sha256:
            problems.append(f"{idx_path} is not the file that was written: its SHA-256 differs from the metadata's")
    advance(idx_path.stat().st_size)
    return CorpusFindings(prefix, len(corpus), corpus.token_count, highest, meta is not None, tuple(problems))


def _files_of(prefix: Path) -> list[Path]:
    """Returns `.bin`, `.idx` and, if there is one, `.loss.bin`. Raises DataError if one of the first two is missing."""
    paths = [with_ending(prefix, ".bin"), with_ending(prefix, ".idx"), loss_path(prefix)]
    if not all(path.is_file() for path in paths[:2]):
        IndexedTokens(prefix)  # says which, and what a prefix is
    return [path for path in paths if path.is_file()]


def _wrong_ids(
    corpus: IndexedTokens, meta: CorpusMeta | None, vocab_size: int | None, lowest: int, highest: int
) -> list[str]:
    wrong = lowest if lowest < 0 else highest
    known = [size for size in (vocab_size, meta.vocab_size if meta is not None else None) if size is not None]
    limit = min(known, default=None)
    if wrong >= 0 and (limit is None or wrong < limit):
        return []
    of_what = f"vocabulary of {limit:,}" if limit is not None else "vocabulary of any tokenizer"
    return [f"{corpus.prefix}.bin holds token id {wrong}, outside the {of_what}: prepare it again"]


def _wrong_marks(path: Path, meta: CorpusMeta | None, advance: Callable[[int], None]) -> list[str]:
    """Returns what is wrong with the marks of loss, one byte per token: 0 or 1."""
    largest, digest = 0, hashlib.sha256()
    with path.open("rb") as stream:
        while content := stream.read(_AT_ONCE):
            marks: NDArray[Any] = np.frombuffer(content, dtype=np.uint8)
            largest = max(largest, int(marks.max()))
            digest.update(content)
            advance(len(content))
    if largest > 1:
        return [f"{path} holds a mark of {largest}, and not only 0 and 1: prepare the corpus again"]
    if meta is not None and meta.loss_sha256 not in (None, digest.hexdigest()):
        return [f"{path} is not the file that was written: its SHA-256 differs from the metadata's"]
    return []
