"""Creates a folder that appears under its name complete or not at all, even if the process is killed.

It is made under a hidden name beside its own, with a lock file in it: a folder whose lock no process holds is the
leftover of a killed one, and the next process removes it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.checkpoint.durable_files import NO_ROOM, remove, room_at, sync, temporary_folder
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.tokenizer_folder import MORE_TEMPLATES
from megalite.checkpoint.safe_files import SAFELY, make_folder, open_to_write, write_small_file

LOCK = "conversion.lock"


@contextmanager
def new_folder(folder: Path, *, overwrite: bool, marker: str) -> Iterator[Path]:
    """Yields a hidden folder beside `folder`; renames it to `folder` at the end, or removes it if the block raises.

    What is there already is replaced only with `overwrite`, and only if it holds a file `marker`, as folders of
    the kind that is written here do, and no other folders. Raises CheckpointError, one sentence.
    """
    folder = folder.resolve()
    check_replaceable(folder, overwrite, marker)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover(folder.parent)
        check_replaceable(folder, overwrite, marker)  # it may have got its name back
        temporary = temporary_folder(folder)
        lock = _locked(temporary)
        try:
            yield temporary
            check_replaceable(folder, overwrite, marker)  # another process may have made it meanwhile
            _publish(temporary, folder)
        finally:
            os.close(lock)
            remove(temporary)
    except OSError as error:
        if why := NO_ROOM.get(error.errno or 0):
            why = f"{why}: free some space, or choose another disk; nothing was left there"
        raise CheckpointError(f"{folder}: {why or f'cannot be written: {error.strerror or error}'}") from None
    remove(_replaced(folder))


def existing_folder(folder: Path) -> Path:
    """Returns `folder`, or the nearest above it that exists. Raises CheckpointError if that is a file."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise CheckpointError(f"{there}: is a file, where a folder is to be written: choose another name")
    return there


def check_replaceable(folder: Path, overwrite: bool, marker: str) -> None:
    """Raises CheckpointError if `folder` holds what must not be replaced."""
    there = existing_folder(folder)
    if there != folder or not any(folder.iterdir()):
        return
    if not (folder / marker).is_file():  # a mistyped path must not cost a home folder
        raise CheckpointError(
            f"{folder}: is not empty and has no {marker}, so it is nothing of this kind and is not overwritten: choose "
            "another name"
        )
    for inner in sorted(folder.iterdir()):  # perhaps the very checkpoint that is exported
        if inner.is_dir() and not inner.is_symlink() and inner.name != MORE_TEMPLATES:
            raise CheckpointError(
                f"{folder}: holds a folder {inner.name}, which would be lost: choose another name, or move it "
                "away first"
            )
    if not overwrite:
        raise CheckpointError(f"{folder}: is there already and not empty: choose another name, or --overwrite it")


def check_room(folder: Path, size: int) -> None:
    """Raises CheckpointError if `size` more bytes do not fit beside `folder`."""
    free = room_at(folder)
    if free < size:
        raise CheckpointError(
            f"{folder}: takes {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free: free some space, or choose "
            "another disk"
        )


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def _locked(temporary: Path) -> int:
    """Creates the empty folder and a lock in it, which the returned descriptor holds."""
    if temporary.is_symlink():
        remove(temporary)
    make_folder(temporary)
    descriptor = open_to_write(temporary / LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"{temporary}: another conversion is writing there: wait for it, or choose another name"
        ) from None
    except OSError:
        pass  # a file system without locks: two conversions of one name cannot be kept apart there
    for path in temporary.iterdir():  # of a save without a lock
        if path.name != LOCK:
            remove(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return descriptor


def _publish(temporary: Path, folder: Path) -> None:
    for path in temporary.rglob("*"):
        sync(path)
    sync(temporary)
    if folder.exists() and any(folder.iterdir()):
        remove(_replaced(folder))
        write_small_file(folder / LOCK, b"")  # until its successor is there it is to get its name back
        folder.rename(_replaced(folder))
    temporary.rename(folder)
    (folder / LOCK).unlink()
    sync(folder)
    sync(folder.parent)


def recover(parent: Path) -> None:
    """Removes the leftovers of killed conversions in `parent`, and gives a folder that one was about to replace its
    name back."""
    for lock in parent.glob(f".*/{LOCK}"):
        hidden, kind = lock.parent, lock.parent.suffix
        own = hidden.with_name(hidden.name.removeprefix(".").removesuffix(kind))
        if kind == ".replaced" and not own.exists():
            lock.unlink()
            hidden.rename(own)
        elif kind in (".tmp", ".replaced") and not _is_held(lock):
            remove(hidden)


def _is_held(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | SAFELY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # or it cannot be known
    finally:
        os.close(descriptor)
    return False
