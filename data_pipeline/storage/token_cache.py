"""Copies of prepared corpora that lie elsewhere, in a folder of this machine. A copy is used only when it is proven.

    CACHE/NAME-1f0c5a.../NAME.bin, .idx, ...     named after the metadata: another corpus gets another folder
    CACHE/NAME-1f0c5a.../.NAME.bin.part          what has been fetched of a file so far
    CACHE/NAME-1f0c5a.../complete.json           size and modification time of each file, once all are proven
    PRIVATE/NAME-77aa01.../NAME.bin, ...         links to the files of a copy that others can write
    PRIVATE/NAME-77aa01.../proven-3c9e...        named after the state of those files when they were proven

A copy is believed if nobody but this user and root can have written it: folder and files are theirs, and no other may
write them. One that others could write is hashed once, and used through links in a folder that is private, where plans
of packing and counts lie too. A folder of this user that others can write is closed to them, and hashed again.

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
from data_pipeline.ownership import is_mine, make_folder, narrow, only_we_write
from data_pipeline.storage.file_io import publish, write_atomically
from data_pipeline.storage.meta import meta_path, parsed_meta
from data_pipeline.storage.paths import with_ending

STAMP = "complete.json"
_LOCK = ".lock"
_LOOK_AGAIN_S = 0.2
_AT_ONCE = 1 << 25  # bytes that are asked for, and hashed
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

ReadPart = Callable[[int, int], bytes]
"""Returns the bytes [first, stop) of a file that lies elsewhere."""


class CorpusCopy:
    """The copy of one corpus in a cache; it may be missing, unfinished or complete.

    `content` is the corpus's metadata as it lies at `url`, `private` a folder for what is known of copies that others
    can write. Raises DataError if that is no metadata with digests.
    """

    def __init__(self, cache: Path, url: str, content: bytes, private: Path) -> None:
        self.url, self._content = url, content
        self.meta = parsed_meta(content, f"{url}.meta.json")
        self._name = url.rpartition("/")[2]
        self._in_cache = cache / f"{self._name}-{hashlib.sha256(content).hexdigest()[:16]}"
        of_place = hashlib.sha256(content + os.fsencode(self._in_cache)).hexdigest()
        self._in_private = private / f"{self._name}-{of_place[:16]}"
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
    def is_foreign(self) -> bool:
        """True if others can write the folder in the cache, and this user cannot keep them from it."""
        folder = self._in_cache
        return folder.is_dir() and not only_we_write(folder) and not is_mine(folder)

    @property
    def folder(self) -> Path:
        """The folder into which this process writes, and from which it reads."""
        return self._in_private if self.is_foreign else self._in_cache

    @property
    def prefix(self) -> Path:
        return self.folder / self._name

    @property
    def is_complete(self) -> bool:
        """True if all files are here as they were when they were proven; none is read for it."""
        try:
            if self.is_foreign:
                return only_we_write(self.folder) and (self.folder / self._proof()).is_file()
            if not all(map(only_we_write, (self.folder, *self.folder.iterdir()))):
                return False
            is_ours = meta_path(self.prefix).read_bytes() == self._content
            return is_ours and json.loads((self.folder / STAMP).read_bytes()) == self._stamp()
        except (OSError, ValueError, RecursionError):
            return False

    def prove_foreign(self, advance: Callable[[int], None]) -> None:
        """Hashes the files of a copy that others can write, and links to them. Raises DataError if one is another."""
        files = {ending: with_ending(self._in_cache / self._name, ending) for ending in self.digests}
        others = f"{self._in_cache} belongs to user number {self._in_cache.stat().st_uid}, not to you, and"
        remedy = (
            f"let its owner finish it (`megalite data fetch`), remove {self._in_cache}, or set data.cache to a folder"
        )
        if missing := [path.name for path in files.values() if not path.is_file()]:
            raise DataError(f"{others} it lacks {missing[0]}: {remedy} of yours")
        state = self._proof()
        for ending, path in files.items():
            if _sha256(path, advance) != self.digests[ending]:
                raise DataError(
                    f"{others} its {path.name} is not the file that {self.url}.meta.json names: {remedy} of yours"
                )
        with self._explained():
            for ending, path in files.items():
                link = with_ending(self.prefix, ending)
                link.unlink(missing_ok=True)
                link.symlink_to(path)
            write_atomically(meta_path(self.prefix), self._content)
            (self.folder / state).touch(0o644)

    def _proof(self) -> str:
        """Returns the name for the state of the files of a foreign copy; their times of change are the kernel's."""
        states = [with_ending(self._in_cache / self._name, ending).stat() for ending in self.digests]
        facts = [(one.st_uid, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in states]
        return f"proven-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"

    def _stamp(self) -> dict[str, list[int]]:
        paths = [meta_path(self.prefix), *(with_ending(self.prefix, ending) for ending in self.digests)]
        found = {path.name: path.stat() for path in paths}
        return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}

    def bytes_here(self) -> int:
        """Returns how many bytes of the files are here, those of unfinished ones included."""
        found = 0
        for ending in self.digests:
            for path in (with_ending(self._in_cache / self._name, ending), self._part(ending)):
                with suppress(OSError):
                    found += path.stat().st_size
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the folder to this process, as soon as another one that fetches into it has ended.

        Raises DataError if the folder cannot be written or locked.
        """
        with self._explained():
            make_folder(self.folder, 0o755)
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
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
            with self._explained():
                self._close_to_others()
            yield
        finally:
            os.close(descriptor)

    def _close_to_others(self) -> None:
        """Removes what others have put, or could write, in a folder of this user; what has a digest is hashed again."""
        kept = {*(with_ending(self.prefix, ending) for ending in self.digests), *map(self._part, self.digests)}
        kept.add(self.folder / _LOCK)
        there = [path for path in self.folder.iterdir() if not (self.is_foreign and path.is_symlink())]
        if all(map(only_we_write, (self.folder, *there))):
            return
        narrow(self.folder)
        for path in self.folder.iterdir():
            if path in kept and not path.is_symlink() and is_mine(path):
                narrow(path)
            elif not path.is_dir() or path.is_symlink():
                path.unlink()
        if not only_we_write(self.folder):
            raise DataError(
                f"{self.folder} can be written by other users, and its file system keeps no modes that say otherwise: "
                "set data.cache to a folder elsewhere"
            )

    def fetch(self, ending: str, size: int, read: ReadPart, advance: Callable[[int], None]) -> None:
        """Fetches a file of `size` bytes, goes on with a part of it, and names it once its digest is right.

        `advance` is told of bytes as they are there. Raises DataError if they are others than the metadata promises.
        """
        final, part, digest = with_ending(self.prefix, ending), self._part(ending), self.digests[ending]
        with self._explained():
            if final.is_file():  # proven by a process that was killed before the end, or touched since
                if _sha256(final, advance) == digest:
                    return
                advance(-final.stat().st_size)
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


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while content := stream.read(_AT_ONCE):
            digest.update(content)
            advance(len(content))
    return digest.hexdigest()


def _opened(part: Path) -> BinaryIO:
    """Opens a part where it is a plain file of ours, else a new one in its place."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(part.lstat().st_mode):
            part.unlink()
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    return os.fdopen(descriptor, "r+b")


def free_bytes(folder: Path) -> int:
    """Returns the free space of the disk on which a folder is, or will be created."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).free
