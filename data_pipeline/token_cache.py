"""Copies of prepared corpora that lie elsewhere, in a folder of this machine. A copy is used only when it is proven.

    CACHE/NAME-1f0c5a.../NAME.bin, .idx, ...     named after the metadata: another corpus gets another folder
    CACHE/NAME-1f0c5a.../.NAME.bin.part          what has been fetched of a file so far
    CACHE/NAME-1f0c5a.../complete.json           size and modification time of each file, once all are proven

A file gets its name when its SHA-256 is the one in the metadata, and `complete.json` is written after the last of them.
So a process may be killed at any moment: the next one goes on from the part. Nothing is ever removed here but parts
that are wrong.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.files import publish, sha256_of_file, with_ending, write_atomically
from data_pipeline.meta import meta_path, parsed_meta

STAMP = "complete.json"
_LOCK = ".lock"
_LOOK_AGAIN_S = 0.2
_AT_ONCE = 1 << 25  # bytes that are asked for, and hashed
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

ReadPart = Callable[[int, int], bytes]
"""Returns the bytes [first, stop) of a file that lies elsewhere."""


class CorpusCopy:
    """The copy of one corpus in a cache; it may be missing, unfinished or complete.

    `content` is the corpus's metadata as it lies at `url`. Raises DataError if that is no metadata with digests.
    """

    def __init__(self, cache: Path, url: str, content: bytes) -> None:
        self.url, self._content = url, content
        self.meta = parsed_meta(content, f"{url}.meta.json")
        name = url.rpartition("/")[2]
        self.folder = cache / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
        self.prefix = self.folder / name
        self.digests = {".bin": self.meta.sha256, ".idx": self.meta.idx_sha256}
        if self.meta.loss_sha256 is not None:
            self.digests[".loss.bin"] = self.meta.loss_sha256
        try:
            width = np.dtype(self.meta.dtype).itemsize
            for digest in self.digests.values():
                bytes.fromhex(digest)
            self._sizes = {".bin": width * int(self.meta.token_count), ".loss.bin": int(self.meta.token_count)}
        except (TypeError, ValueError) as error:
            raise DataError(f"{url}.meta.json is not readable as metadata of a corpus: upload it again") from error

    def check_size(self, ending: str, size: int | None) -> None:
        """Raises DataError if a file of the corpus is missing at its URL, or has another size than its tokens take."""
        if size is None:
            raise DataError(f"{self.url}{ending} does not exist, but {self.url}.meta.json names it: upload it too")
        expected = self._sizes.get(ending, size)
        if size != expected:
            raise DataError(
                f"{self.url}{ending} has {size:,} bytes, and by {self.url}.meta.json it must have {expected:,}: upload "
                "it again"
            )

    @property
    def is_complete(self) -> bool:
        """True if all files are here as they were when they were proven; none is read for it."""
        try:
            return json.loads((self.folder / STAMP).read_bytes()) == self._stamp()
        except (OSError, ValueError):
            return False

    def _stamp(self) -> dict[str, list[int]]:
        paths = [meta_path(self.prefix), *(with_ending(self.prefix, ending) for ending in self.digests)]
        found = {path.name: path.stat() for path in paths}
        return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}

    def bytes_here(self) -> int:
        """Returns how many bytes of the files are here, those of unfinished ones included."""
        found = 0
        for ending in self.digests:
            for path in (with_ending(self.prefix, ending), self._part(ending)):
                with suppress(OSError):
                    found += path.stat().st_size
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the folder to this process, as soon as another one that fetches into it has ended.

        Raises DataError if the folder cannot be written or locked.
        """
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOOK_AGAIN_S)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    raise DataError(
                        f"{self.folder} lies on a file system without locks, which keep two processes from fetching "
                        "into one file: set data.cache to a folder elsewhere"
                    ) from None
            yield
        finally:
            os.close(descriptor)

    def fetch(self, ending: str, size: int, read: ReadPart, advance: Callable[[int], None]) -> None:
        """Fetches a file of `size` bytes, goes on with a part of it, and names it once its digest is right.

        `advance` is told of bytes as they are there. Raises DataError if they are others than the metadata promises.
        """
        final, part, digest = with_ending(self.prefix, ending), self._part(ending), self.digests[ending]
        with self._explained():
            if final.is_file():  # proven by a process that was killed before the end, or touched since
                if sha256_of_file(final) == digest:
                    advance(final.stat().st_size)
                    return
                final.unlink()
            found, was_resumed = self._filled(part, size, read, advance)
            if found != digest and was_resumed:  # the part may have been damaged
                advance(-size)
                part.unlink()
                found, _ = self._filled(part, size, read, advance)
            if found != digest:
                part.unlink()
                raise DataError(
                    f"{self.url}{ending} is not the file that was written: its SHA-256 is {found}, and by "
                    f"{self.url}.meta.json it must be {digest}: upload both again"
                )
            publish(part, final)

    def fetch_unproven(self, ending: str, size: int, read: ReadPart, advance: Callable[[int], None]) -> None:
        """Fetches a file for which the metadata has no digest, unless there is one; its reader checks what it is."""
        final, part = with_ending(self.prefix, ending), self._part(ending)
        with self._explained():
            if not final.exists():
                part.unlink(missing_ok=True)
                self._filled(part, size, read, advance)
                publish(part, final)

    def finish(self) -> None:
        """Marks the copy as complete, when all of its files have been fetched."""
        with self._explained():
            write_atomically(meta_path(self.prefix), self._content)
            write_atomically(self.folder / STAMP, json.dumps(self._stamp()).encode())

    def _part(self, ending: str) -> Path:
        return self.folder / f".{self.prefix.name}{ending}.part"

    def _filled(self, part: Path, size: int, read: ReadPart, advance: Callable[[int], None]) -> tuple[str, bool]:
        """Fills up a part to `size` bytes; returns its SHA-256, and whether some of it was there before."""
        digest = hashlib.sha256()
        with _opened(part) as stream:
            while content := stream.read(_AT_ONCE):
                digest.update(content)
                advance(len(content))
            place = stream.tell()
            was_resumed = place > 0
            while place < size:
                content = read(place, min(place + _AT_ONCE, size))
                stream.write(content)
                digest.update(content)
                advance(len(content))
                place += len(content)
            stream.flush()
            os.fsync(stream.fileno())
        return digest.hexdigest(), was_resumed

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns an error of this machine's disk into a sentence."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"{self.folder} has no room for the copy of {self.url}: remove copies there that no run uses, or "
                    "set data.cache to a folder on a larger disk"
                ) from None
            raise DataError(
                f"{self.folder} cannot be written ({error.strerror or error}): set data.cache to a folder of yours"
            ) from None


def _opened(part: Path) -> BinaryIO:
    """Opens a part where it is a plain file of ours, else a new one in its place."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(part.lstat().st_mode):
            part.unlink()
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(descriptor, "r+b")


def free_bytes(folder: Path) -> int:
    """Returns the free space of the disk on which a folder is, or will be created."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free
