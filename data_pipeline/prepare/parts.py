"""Part files: the encoded units of a `prepare`, which `OUTPUT.parts/` keeps until it is finished.

journal.json          the digest of the parts (plan.py), under an older name; those of other jobs are deleted
documents.json        how many documents each unit holds, if their numbers decide what is written (fill-in-the-middle)
part-000042.bin       the token ids of unit 42, as they go into OUTPUT.bin
part-000042.loss.bin  of conversations, their bytes of OUTPUT.loss.bin
part-000042.npz       what `PartFacts` lists
lock, workers         held by the running process and its workers; the kernel releases them however they end

Units are cut by a fixed rule, so the number identifies the text. The `.npz` gets its name last, when all files of the
part are complete: a part that has one is done, and a rerun resumes.
"""

import fcntl
import io
import json
import os
import shutil
import time
import zipfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.ownership import make_folder
from data_pipeline.storage.file_io import open_anew, write_atomically
from data_pipeline.storage.paths import with_ending
from data_pipeline.typed_json import of_json

_ENDINGS = (".bin", ".loss.bin")
_WORKERS_END_WITHIN_S = 20.0


class RemainingPart(NamedTuple):
    """A part without the documents that are left out."""

    token_count: int
    document_ends: NDArray[np.int64]  # [documents] exclusive positions in the tokens that remain
    stretches: list[tuple[int, int]]  # of the tokens in the part's file that remain


class PartFacts(NamedTuple):
    """The contents of the `.npz` of a part: what its tokens are."""

    token_count: int
    document_ends: NDArray[np.int64]  # [documents] exclusive positions in the tokens; a later part may end one more
    bad_rows: int  # that could not be read or encoded, and are not among the tokens
    refused: NDArray[np.int64]  # documents, by place in this part, of which a piece could not be encoded
    first_bad_rows: NDArray[np.uint8]  # lines about some of the bad rows, UTF-8

    @property
    def sentences(self) -> list[str]:
        """Messages about some of the bad rows."""
        return self.first_bad_rows.tobytes().decode().splitlines()

    def without(self, documents: set[int]) -> RemainingPart:
        """Leaves out some of the documents; the last one may be that which a later part ends."""
        leaving = [document for document in documents if 0 <= document <= len(self.document_ends)]
        if not leaving:
            return RemainingPart(self.token_count, self.document_ends, [(0, self.token_count)])
        lengths = np.diff(self.document_ends, prepend=0, append=self.token_count)
        stays = np.ones(len(lengths), dtype=np.bool_)
        stays[leaving] = False
        begins = np.concatenate(([0], self.document_ends))
        stretches = [
            (int(begins[document]), int(begins[document] + lengths[document])) for document in np.flatnonzero(stays)
        ]
        ends = np.cumsum(lengths * stays)[:-1][stays[:-1]]
        return RemainingPart(int(lengths[stays].sum()), ends, stretches)


class PartWriter:
    """Writes one part as its unit is encoded, so that a unit of any size takes no more memory than its documents' ends.

    As a context manager it completes the part, or removes what it has written when an error ends the block.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, has_loss: bool) -> None:
        self._path, self._dtype = path, dtype
        self._temporary = {
            ending: path.with_name(f".{path.stem}{ending}.tmp") for ending in (_ENDINGS if has_loss else _ENDINGS[:1])
        }
        with self._named_errors():
            self._streams = [open_anew(temporary) for temporary in self._temporary.values()]
        self._token_count = 0
        self._ends, self._refused = array("q"), array("q")

    def append(
        self, ids: Sequence[int] | NDArray[np.uint32], loss: NDArray[np.uint8] | None, *, ends_document: bool
    ) -> None:
        """Writes the tokens of a piece, and of conversations which of them carry loss."""
        arrays = (np.array(ids, dtype=self._dtype), loss)
        with self._named_errors():
            for stream, content in zip(self._streams, arrays, strict=False):
                if content is not None:
                    stream.write(content.data)
        self._token_count += len(ids)
        if ends_document:
            self._ends.append(self._token_count)

    def refuse_document(self, *, ends_document: bool) -> None:
        """Marks the document of a piece; when the parts are joined it is left out of all of them."""
        self._refused.append(len(self._ends))
        self.append([], None, ends_document=ends_document)

    def finish(self, bad_rows: int, first_bad_rows: Sequence[str]) -> None:
        """Completes the part, in the place of one that lacks rows."""
        self._path.unlink(missing_ok=True)
        with self._named_errors():
            for stream, (ending, temporary) in zip(self._streams, self._temporary.items(), strict=True):
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
                temporary.replace(self._path.with_suffix(ending))
        ends, refused = (np.array(places, dtype=np.int64) for places in (self._ends, self._refused))
        sentences = np.frombuffer("\n".join(first_bad_rows).encode("utf-8", "replace"), dtype=np.uint8)
        facts = PartFacts(self._token_count, ends, bad_rows, refused, sentences)
        content = io.BytesIO()
        np.savez(content, **facts._asdict())
        write_atomically(self._path, content.getvalue())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream, temporary in zip(self._streams, self._temporary.values(), strict=True):
            with suppress(OSError):  # what is still to be written has no room either
                stream.close()
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = error.filename or str(self._path)  # a full disk is reported without a name
            raise


class PartStore:
    """The part files of one job."""

    def __init__(self, output: Path, parts_sha256: str) -> None:
        self.output, self.folder, self.sha256 = output, with_ending(output, ".parts"), parts_sha256
        self.journal = self.folder / "journal.json"  # there once a run of this or another job has begun, until its end
        self._workers, self._counts = self.folder / "workers", self.folder / "documents.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder for this process; at the end removes it if it holds no part."""
        path, is_file = self.folder / "lock", self.folder.exists() and not self.folder.is_dir()
        for ours, is_other in ((self.folder, is_file), (path, path.is_dir()), (self._workers, self._workers.is_dir())):
            if ours.is_symlink() or is_other:
                raise DataError(f"{ours} is nothing that prepare makes: remove it, or choose another output")
        missing = [parent for parent in self.folder.parents if not parent.exists()]  # innermost first
        make_folder(self.folder)
        with os.fdopen(_open_lock(path), "rb") as lock:
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
                    with suppress(OSError):  # they hold what has been prepared
                        for parent in missing:
                            parent.rmdir()

    def hold_as_worker(self) -> None:
        """Keeps later runs waiting until this process has ended: a worker outlives a killed parent for a moment."""
        fcntl.flock(_open_lock(self._workers), fcntl.LOCK_SH)

    def begin(self) -> int:
        """Deletes the parts of another job that was never finished; returns their number. Call it while locked."""
        self._wait_for_workers()
        is_ours = self._belongs()
        foreign = [] if is_ours else list(self.folder.glob("part-*.npz"))
        for file in self.folder.glob(".part-*.tmp"):
            file.unlink()
        if not is_ours:
            for file in (self._counts, *foreign, *self.folder.glob("part-*.bin")):  # what completes a part goes first
                file.unlink(missing_ok=True)
        write_atomically(self.journal, json.dumps({"job_sha256": self.sha256}).encode())
        return len(foreign)

    def _wait_for_workers(self) -> None:
        """Waits for the workers of a run that was killed, which may still write parts."""
        with os.fdopen(_open_lock(self._workers), "rb") as lock:
            deadline = time.monotonic() + _WORKERS_END_WITHIN_S
            while True:
                try:
                    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise DataError(
                            f"processes of a killed run of prepare still write into {self.folder}: end them, or wait"
                        ) from error
                    time.sleep(0.05)

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

    def facts(self, number: int) -> PartFacts:
        """Reads what the tokens of a part are."""
        with self._arrays(number) as arrays:
            tokens, rows = int(arrays["token_count"]), int(arrays["bad_rows"])
            return PartFacts(tokens, arrays["document_ends"], rows, arrays["refused"], arrays["first_bad_rows"])

    @contextmanager
    def _arrays(self, number: int) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Opens the facts of a part; each is read when it is asked for."""
        path = self.path(number)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                yield arrays
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"part file {path} is damaged ({error}): delete it and run prepare again") from error

    def open_tokens(self, number: int, size: int, *, loss: bool = False) -> BinaryIO:
        """Opens the tokens of a part, or their loss, for reading. Raises DataError unless they have `size` bytes."""
        path = self.path(number).with_suffix(_ENDINGS[loss])
        found = path.stat().st_size if path.is_file() else 0
        if found != size or path.is_symlink():
            raise DataError(
                f"part file {path} is damaged ({found} bytes, not {size}): delete {self.path(number).name} beside it "
                "and run prepare again"
            )
        return path.open("rb")

    @property
    def document_counts(self) -> list[int] | None:
        """The number of documents of each unit, if they have been counted."""
        if not self._counts.is_file():
            return None
        try:
            return of_json(list[int], self._counts.read_bytes())
        except ValueError:  # they are counted again
            return None

    def keep_document_counts(self, counts: Sequence[int]) -> None:
        """Saves the number of documents of each unit, so that a run that goes on does not count them again."""
        write_atomically(self._counts, json.dumps(counts).encode())

    def _lacks_rows(self, number: int) -> bool:
        with self._arrays(number) as arrays:  # of thousands of parts: two facts alone
            return bool(arrays["bad_rows"]) or len(arrays["refused"]) > 0

    def remove(self) -> None:
        """Removes the folder; the journal goes last, so that a run after a kill knows what is left."""
        for file in (*self.folder.glob("part-*"), *self.folder.glob(".part-*")):
            with suppress(OSError):
                file.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_own(self) -> None:
        """Removes the folder if its parts are of this job: a finished job may have been killed before it did."""
        if self._belongs():
            self.remove()

    def _belongs(self) -> bool:
        if not self.journal.is_file():  # a pipe would be waited for
            return False
        try:
            return bool(json.loads(self.journal.read_bytes())["job_sha256"] == self.sha256)
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return False


def _open_lock(path: Path) -> int:
    """Opens a file to be locked; what may stand there instead is neither followed nor waited for."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o664)
