"""Part files: each holds one encoded chunk of text, and `OUTPUT.parts/` keeps them until a `prepare` is finished.

journal.json      the digest of the job the parts belong to; parts of other jobs are deleted
part-000042.npz   chunk 42, encoded; chunks are cut by a fixed rule, so the number identifies the text
lock              held by the running process; the kernel releases it however the process ends

A part is an uncompressed `.npz` of what `PartContents` lists; its last tokens may belong to a document that the next
part ends. A part is renamed to its final name only when it is complete, so a part that exists is done, and a
rerun resumes.
"""

import fcntl
import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.files import with_ending, write_atomically
from data_pipeline.indexed import token_dtype
from data_pipeline.prepare.bad_rows import BadRows
from data_pipeline.prepare.cutting import TextPiece
from data_pipeline.prepare.encoding import PieceEncoder


class PartSize(NamedTuple):
    """The size of a part that has just been encoded."""

    tokens: int
    documents: int
    first_bad_rows: list[str]  # sentences about some of the rows that could not be encoded


class PartContents(NamedTuple):
    """The contents of a part file."""

    tokens: NDArray[Any]  # [n]
    document_ends: NDArray[np.int64]  # [documents] exclusive positions in `tokens`
    loss: NDArray[np.uint8]  # [n]; empty for text, all of which carries loss
    bad_rows: int  # that could not be encoded, and are not in `tokens`
    refused: NDArray[np.int64]  # documents, by place in this part, of which a piece could not be encoded

    def without(self, documents: set[int]) -> Self:
        """Returns the part without some of its documents; the last one may be that which a later part ends."""
        lengths = np.diff(self.document_ends, prepend=0, append=len(self.tokens))
        stays = np.array([number not in documents for number in range(len(lengths))])
        if stays.all():
            return self
        ends = np.cumsum(lengths * stays)[:-1][stays[:-1]]
        of_tokens = stays.repeat(lengths)
        loss = self.loss[of_tokens] if len(self.loss) else self.loss
        return self._replace(tokens=self.tokens[of_tokens], document_ends=ends, loss=loss)


def encode_part(encoder: PieceEncoder, pieces: Sequence[TextPiece], bad_rows: BadRows, path: Path) -> PartSize:
    """Encodes `pieces` and writes them as a part at `path`. A document that is refused is a bad row.

    If it has several pieces, others of them may be in other parts: it is marked, and left out when the parts are read.
    """
    dtype = token_dtype(encoder.tokenizer.vocab_size)
    arrays: list[NDArray[Any]] = [np.empty(0, dtype)]
    masks: list[NDArray[Any]] = [np.empty(0, np.uint8)]
    ends: list[int] = []
    refused: list[int] = []
    token_count = whole = 0
    for piece in pieces:
        try:
            ids, loss = encoder.encode(piece)
        except DataError as error:
            bad_rows(error)
            if piece.begins_document and piece.ends_document:
                whole += 1
                continue
            refused.append(len(ends))
            ids, loss = [], None
        arrays.append(np.array(ids, dtype=dtype))
        if loss is not None:
            masks.append(loss)
        token_count += len(ids)
        if piece.ends_document:
            ends.append(token_count)
    places, marked = (np.array(each, dtype=np.int64) for each in (ends, refused))
    part = PartContents(np.concatenate(arrays), places, np.concatenate(masks), whole, marked)
    content = io.BytesIO()
    np.savez(content, **part._asdict())
    write_atomically(path, content.getvalue())
    return PartSize(token_count, len(ends), bad_rows.first)


@contextmanager
def holding_back_interrupts() -> Iterator[None]:
    """Blocks SIGINT in this process for the `with`, and for ever in the processes that it starts.

    Ctrl-C in a terminal is sent to all of them, and each worker would print a traceback; this process ends them.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def exit_with_parent() -> None:
    """Ends this worker process when its parent is killed, and leaves Ctrl-C to the parent.

    Otherwise it would wait for work forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "only for worker processes"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class PartStore:
    """The part files of one job."""

    def __init__(self, output: Path, job_sha256: str) -> None:
        self.output, self.folder, self.job_sha256 = output, with_ending(output, ".parts"), job_sha256

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder for this process; at the end removes it if it holds no part."""
        path = self.folder / "lock"
        for ours, is_other in ((self.folder, self.folder.exists() and not self.folder.is_dir()), (path, path.is_dir())):
            if ours.is_symlink() or is_other:
                raise DataError(f"{ours} is nothing that prepare makes: remove it, or choose another output")
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags, 0o666), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"another process is preparing {self.output} right now: wait for it or choose another output"
                ) from error
            try:
                yield
            finally:
                if not any(self.folder.glob("part-*.npz")):
                    self.remove()

    def begin(self) -> int:
        """Deletes the parts of another job that was never finished; returns their number. Call it while locked."""
        foreign = [] if self._belongs() else list(self.folder.glob("part-*.npz"))
        for file in (*foreign, *self.folder.glob(".part-*.tmp")):
            file.unlink()
        write_atomically(self._journal, json.dumps({"job_sha256": self.job_sha256}).encode())
        return len(foreign)

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.npz"

    def finished(self, *, lacking_rows: bool) -> set[int]:
        """Returns the numbers of the complete parts of this job, those that lack bad rows only if `lacking_rows`.

        Changes nothing on disk.
        """
        if not self._belongs():
            return set()
        files = [file for file in self.folder.glob("part-*.npz") if file.is_file()]
        numbers = {int(file.stem.removeprefix("part-")) for file in files}
        return numbers if lacking_rows else {number for number in numbers if not self._lacks_rows(number)}

    def read(self, number: int) -> PartContents:
        """Reads the part of a number."""
        with self._opened(number) as arrays:
            tokens, ends, loss = (arrays[name] for name in ("tokens", "document_ends", "loss"))
            return PartContents(tokens, ends, loss, int(arrays["bad_rows"]), _refused(arrays))

    def refused_documents(self, part_count: int) -> set[int]:
        """Returns the documents, numbered over all parts, of which a piece could not be encoded."""
        refused, first = set[int](), 0
        for number in range(part_count):
            with self._opened(number) as arrays:
                refused.update((_refused(arrays) + first).tolist())
                first += len(arrays["document_ends"])
        return refused

    def _lacks_rows(self, number: int) -> bool:
        with self._opened(number) as arrays:
            return bool(arrays["bad_rows"]) or len(_refused(arrays)) > 0

    @contextmanager
    def _opened(self, number: int) -> Iterator[Any]:
        """Opens the arrays of a part, which are read one by one. Raises DataError, there too, if it is damaged."""
        path = self.path(number)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                yield arrays
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"part file {path} is damaged ({error}): delete it and run prepare again") from error

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_own(self) -> None:
        """Removes the folder if its parts are of this job: a finished job may have been killed before it did."""
        if self._belongs():
            self.remove()

    @property
    def has_journal(self) -> bool:
        """True if a run of this or another job has begun and not finished."""
        return self._journal.exists()

    @property
    def _journal(self) -> Path:
        return self.folder / "journal.json"

    def _belongs(self) -> bool:
        if not self._journal.is_file():  # a pipe would be waited for
            return False
        try:
            return bool(json.loads(self._journal.read_bytes())["job_sha256"] == self.job_sha256)
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return False


def _refused(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Returns the marked documents of a part; older versions marked none."""
    return arrays["refused"] if "refused" in arrays else np.empty(0, np.int64)
