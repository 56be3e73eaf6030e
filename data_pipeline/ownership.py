"""Tells whether another user may have written a file, which is then read only once it is proven."""

import os
import stat
from contextlib import suppress
from pathlib import Path

_BY_OTHERS = 0o022  # bits of a mode


def only_we_write(path: Path) -> bool:
    """True if a file or folder is this user's or root's, as is the link that leads to it, and no other may write it."""
    state = path.stat()
    return {path.lstat().st_uid, state.st_uid} <= {os.geteuid(), 0} and not state.st_mode & _BY_OTHERS


def is_mine(path: Path) -> bool:
    """True if a file or folder, and the link that leads to it, are this user's."""
    return {path.lstat().st_uid, path.stat().st_uid} == {os.geteuid()}


def narrow(path: Path) -> None:
    """Takes the right of others to write a file or folder of this user."""
    with suppress(OSError):  # a file system without modes
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_BY_OTHERS)


def make_folder(folder: Path, mode: int = 0o775) -> None:
    """Creates a folder and those above it where they are missing; under no umask can everybody write them."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent, mode)
        folder.mkdir(mode, exist_ok=True)
