"""Durable files: their content is on disk before they are renamed into place."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import FileEntry
from megalite.checkpoint.safe_files import SAFELY, check_file_is_safe, open_new

NO_ROOM = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}


def temporary_folder(folder: Path) -> Path:
    """Returns the folder in which a checkpoint is written before it is committed as `folder`."""
    return folder.with_name(f".{folder.name}.tmp")


def sync(path: Path) -> None:
    """Waits until the bytes of a file or the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a folder and its contents, or a link to one; ignores errors."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_durably(path: Path, data: bytes) -> None:
    """Replaces `path` atomically: a reader sees the old bytes or the new ones, never a part."""
    descriptor, temporary = _temporary_of(path)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        try:
            rest = memoryview(data)
            while rest:  # a disk that is nearly full takes a part
                rest = rest[file.write(rest) :]
            sync(temporary)
            temporary.replace(path)  # while it is locked: no other process writes into what becomes `path`
        except OSError as error:
            temporary.unlink(missing_ok=True)
            error.filename = error.filename or str(path)  # a full disk is reported without a name
            raise
    sync(path.parent)


def _temporary_of(path: Path) -> tuple[int, Path]:
    """Creates a file that nobody else writes: `.NAME.tmp`, where killed processes may have left one, or, while another
    process has that one or a stranger has put something there, a file of its own."""
    usual = path.with_name(f".{path.name}.tmp")
    _remove_left_over(usual)
    with suppress(FileExistsError):
        descriptor = open_new(usual)
        if _is_locked_by_us(descriptor, usual):
            return descriptor, usual
        os.close(descriptor)
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    return open_new(own), own


def remove_left_overs(folder: Path) -> None:
    """Removes what killed processes have left of files that `write_durably` was writing into a folder."""
    for path in folder.glob(".*.tmp"):
        if not path.is_dir():
            _remove_left_over(path)


def _remove_left_over(temporary: Path) -> None:
    """Removes a temporary file that no process writes, instead of writing into it: it may have a second name."""
    with suppress(OSError):
        check_file_is_safe(temporary)
        descriptor = os.open(temporary, os.O_RDONLY | SAFELY)
        try:
            if _is_locked_by_us(descriptor, temporary):
                temporary.unlink()
        finally:
            os.close(descriptor)


def _is_locked_by_us(descriptor: int, path: Path) -> bool:
    """Locks an open file, and returns whether that worked and the file still has its name."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.lstat())  # or another process has just renamed it
    return False


def room_at(folder: Path) -> int:
    """Returns the free bytes on the file system of `folder`, which need not exist yet."""
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    return shutil.disk_usage(there).free


def digest(path: Path) -> FileEntry:
    """Returns size and SHA-256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(size=path.stat().st_size, sha256=sha256)


def verify_digest(path: Path, recorded: FileEntry) -> None:
    """Reads a file and compares its SHA-256. Raises CheckpointError if it differs."""
    if digest(path) != recorded:
        raise changed(path)


def changed(path: Path) -> CheckpointError:
    """Returns the error of a checkpoint's file whose digest is not the recorded one."""
    return CheckpointError(f"{path.parent}: {path.name} has changed since it was written: its digest differs")
