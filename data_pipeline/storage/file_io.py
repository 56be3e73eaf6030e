"""Writes files that appear whole under their names or not at all, and reads files at places all over them."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import DataError

_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024  # bytes, by its specification


def refuse_lfs_pointer(path: Path) -> None:
    """Raises DataError where a file is what Git leaves in the place of one that Git LFS has not fetched."""
    if path.is_file() and path.stat().st_size <= _LARGEST_POINTER and path.read_bytes().startswith(_POINTER):
        raise DataError(
            f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its repository, or download it"
        )


def open_anew(path: Path) -> BinaryIO:
    """Creates a file that nobody else may write in the place of what is there, as somebody's link or pipe."""
    path.unlink(missing_ok=True)
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o644))


def publish(temporary: Path, final: Path) -> None:
    """Moves a completely written and fsynced file to its final name, durably."""
    temporary.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes the file so that readers see its old content or the new one, never a part."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open_anew(temporary) as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk is reported without a name
        raise


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_MOST_OPEN = 64  # files of a process; a rank's limit is often 1,024 in all


class RandomAccessFile:
    """A file that is read at places all over it, as it was when it was looked at first.

    It is read with `pread`, not mapped: a random place of a mapped file brings in a whole read-ahead window from a cold
    disk, a mapping holds a descriptor for good, and an error of the disk ends the process. Of all files of a process
    only those used last are open.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._status = path, path.stat()
        self.size = self._status.st_size

    def read(self, place: int, into: memoryview) -> None:
        """Fills the memory of an array from byte `place` on. Raises DataError if the file is another one by now."""
        if not into.nbytes:
            return
        file, missing = _opened(self), into.nbytes
        left = into
        while count := os.preadv(file.descriptor, [left], place):
            if count == missing:
                return
            missing, place = missing - count, place + count  # at most 2 GiB are read at once
            left = into.cast("B")[-missing:]
        raise DataError(f"{self.path} became shorter while it was in use: write it again")

    def check_same(self, now: os.stat_result) -> None:
        """Raises DataError unless `now` is of the same file; one that was only touched is.

        Other bytes of the same number, written into the same file, look like a touch and are not noticed. Writers here
        always rename a new file into its place.
        """
        then = self._status
        if now.st_size != then.st_size or (now.st_ino != then.st_ino and now.st_mtime_ns != then.st_mtime_ns):
            raise DataError(f"{self.path} was replaced while it was in use: start again, with the data as it is now")


class _Descriptor:
    """An open file, closed when the last reader has let go of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@lru_cache(maxsize=_MOST_OPEN)
def _opened(file: RandomAccessFile) -> _Descriptor:
    try:
        opened = _Descriptor(os.open(file.path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        raise DataError(f"{file.path} was removed while it was in use: put it back, and start again") from None
    file.check_same(os.fstat(opened.descriptor))
    # pages in a row are not read ahead: of two samples that lie close together, the second would bring in many
    os.posix_fadvise(opened.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return opened
