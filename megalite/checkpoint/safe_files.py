"""Opens, reads and writes files of a run safely where strangers may write too: follows no link, waits for no pipe.

Others may be able to write into the folder of a run: a group that shares it, or whoever owns it. A file is accepted if
it is a regular file that belongs to this user, to root, or to the owner of its folder, who could replace it anyway; in
a folder that a group may write it may belong to anybody. A private file or folder is readable by its owner alone.
No torch here.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
FOR_OTHERS, FOR_GROUP = 0o022, 0o020  # bits of a mode: may be written by others than the owner; by the group
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


class UnsafeFile(OSError):
    """A file or folder of a run is not what a run makes; the message is one sentence with what to do."""


@dataclass(frozen=True)
class _Folder:
    """An open folder, and who may have put files there."""

    descriptor: int
    owner: int
    is_shared: bool  # its group may write

    def check_owner(self, path: Path, state: os.stat_result) -> None:
        if not self.is_shared and state.st_uid not in (os.geteuid(), 0, self.owner):
            raise UnsafeFile(
                f"{path} belongs to {user_name(state.st_uid)}, neither to you nor to the owner of its folder: remove "
                "it, or chown it"
            )

    def mode(self, *, private: bool, folder: bool = False) -> int:
        """Returns the widest mode of what is created here; the umask narrows it."""
        mode = (0o700 if folder else 0o600) if private else (0o755 if folder else 0o644)
        return mode | (mode & 0o700) >> 3 if self.is_shared else mode


def open_to_write(path: Path, *, private: bool = False, append: bool = False) -> int:
    """Opens a regular file for reading and writing, and creates it where there is none; changes no byte of it.

    Returns a descriptor. The folder of a private file may be no link either. A file of ours that others may write gets
    a narrower mode. Raises UnsafeFile, or another OSError.
    """
    with _opened(path.parent, is_ours=private) as folder:
        mode = folder.mode(private=private)
        flags = os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0)
        descriptor = _open_regular(path, flags, mode, folder)
        try:
            state = os.fstat(descriptor)
            folder.check_owner(path, state)
            _narrow(Path(f"/proc/self/fd/{descriptor}"), state, mode, private=private)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def open_new(path: Path, *, private: bool = False, append: bool = False) -> int:
    """Creates a file for reading and writing; returns a descriptor. Raises FileExistsError, for a link too."""
    with _opened(path.parent, is_ours=private) as folder:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY | (os.O_APPEND if append else 0)
        return os.open(path.name, flags, folder.mode(private=private), dir_fd=folder.descriptor)


def read_small_file(path: Path, at_most: int, *, trusted: bool = False, private: bool = False) -> bytes:
    """Returns the bytes of a regular file; with `trusted`, of one that no stranger has put there.

    With `private`, of one that is ours and that nobody else can read or write, in any folder.
    Raises UnsafeFile, also where there are more than `at_most` bytes, or another OSError.
    """
    with (
        _opened(path.parent, is_ours=trusted) as folder,
        os.fdopen(_open_regular(path, os.O_RDONLY, 0, folder), "rb") as file,
    ):
        state = os.fstat(file.fileno())
        if trusted:
            folder.check_owner(path, state)
        if private and state.st_uid != os.geteuid():
            raise UnsafeFile(f"{path} belongs to {user_name(state.st_uid)}, not to you: remove it, or chown it")
        if private and state.st_mode & 0o077:
            mode = stat.S_IMODE(state.st_mode)
            raise UnsafeFile(f"{path} has mode {mode:o}, so others may read or write it: chmod 600 {path}")
        data = file.read(at_most + 1)
    if len(data) > at_most:
        raise UnsafeFile(f"{path} has more than {at_most:,} bytes, which such a file never has: remove it")
    return data


def read_end(path: Path, size: int) -> bytes:
    """Returns the last bytes of a regular file, at most `size`. Raises UnsafeFile, or another OSError."""
    with _opened(path.parent) as folder, os.fdopen(_open_regular(path, os.O_RDONLY, 0, folder), "rb") as file:
        file.seek(-min(size, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read(size)


def read_from(path: Path, start: int, size: int) -> tuple[bytes, int]:
    """Returns the bytes of a regular file from `start` on, at most `size`, and the size of the whole file.

    Raises UnsafeFile, or another OSError.
    """
    with _opened(path.parent) as folder, os.fdopen(_open_regular(path, os.O_RDONLY, 0, folder), "rb") as file:
        whole = file.seek(0, os.SEEK_END)
        file.seek(start)
        return file.read(size), whole


def write_small_file(path: Path, data: bytes, *, private: bool = False, append: bool = False) -> None:
    """Replaces the content of a file in place, or appends to it. Raises UnsafeFile, or another OSError."""
    with os.fdopen(open_to_write(path, private=private, append=append), "wb", buffering=0) as file:
        if not append:
            file.truncate(0)
        rest = memoryview(data)
        while rest:  # a disk that is nearly full takes a part
            rest = rest[file.write(rest) :]


def make_folder(path: Path, *, private: bool = False) -> None:
    """Creates a folder inside one that exists, unless it is there. Raises UnsafeFile, or another OSError."""
    with _opened(path.parent) as parent:
        mode = parent.mode(private=private, folder=True)
        with suppress(FileExistsError):
            return os.mkdir(path.name, mode, dir_fd=parent.descriptor)
        with _opened(path, is_ours=True) as folder:
            state = os.fstat(folder.descriptor)
            parent.check_owner(path, state)
            _narrow(Path(f"/proc/self/fd/{folder.descriptor}"), state, mode, private=private)


def check_file_is_safe(path: Path) -> None:
    """Raises UnsafeFile if what is under a name now is nothing that `open_to_write` would open."""
    with _opened(path.parent) as folder:
        if (state := _check_kind(path, folder)) is not None:
            folder.check_owner(path, state)


def check_own_folder(path: Path) -> None:
    """Raises UnsafeFile if what is under a name now is nothing that `make_folder` would leave there."""
    with suppress(FileNotFoundError), _opened(path.parent) as parent, _opened(path, is_ours=True) as folder:
        parent.check_owner(path, os.fstat(folder.descriptor))


def forbid_writing_by_all() -> None:
    """Gives this process the usual umask, 022, where it has one that lets every user write what the process creates.

    Containers may start programs with umask 0. Checkpoints and logs would be everybody's to change.
    """
    mask = os.umask(FOR_OTHERS)
    os.umask(mask if mask & 0o002 else mask | FOR_OTHERS)


def user_name(number: int) -> str:
    """Returns the name of a user, for sentences; of a number that has none, the number."""
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user number {number}"


@contextmanager
def _opened(path: Path, *, is_ours: bool = False) -> Iterator[_Folder]:
    """Opens a folder, which may be a link unless a run has made it."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if is_ours else 0)
    try:
        descriptor = os.open(path, flags)
    except NotADirectoryError:
        state = path.lstat() if is_ours else path.stat()
        what = KINDS[stat.S_IFMT(state.st_mode)]
        raise UnsafeFile(
            f"{path} is {what}, where a run has a folder: move it away, or choose another run_dir"
        ) from None
    try:
        state = os.fstat(descriptor)
        yield _Folder(descriptor, state.st_uid, state.st_mode & FOR_OTHERS == FOR_GROUP)
    finally:
        os.close(descriptor)


def _open_regular(path: Path, flags: int, mode: int, folder: _Folder) -> int:
    try:
        descriptor = os.open(path.name, flags | SAFELY, mode, dir_fd=folder.descriptor)
    except OSError as error:
        error.filename = str(path)
        _check_kind(path, folder)
        raise
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise UnsafeFile(_not_a_file(path, state))
    return descriptor


def _narrow(path: Path, state: os.stat_result, mode: int, *, private: bool) -> None:
    """Takes the rights of others to write what is ours, and to read it where it is private."""
    excess = state.st_mode & ~mode & (0o077 if private else FOR_OTHERS)
    if excess and state.st_uid == os.geteuid():
        with suppress(OSError):  # a file system without modes
            path.chmod(stat.S_IMODE(state.st_mode) & ~excess)


def _check_kind(path: Path, folder: _Folder) -> os.stat_result | None:
    """Raises UnsafeFile if there is something under a name that is no regular file; None if there is nothing."""
    try:
        state = os.stat(path.name, dir_fd=folder.descriptor, follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(state.st_mode):
        raise UnsafeFile(_not_a_file(path, state))
    return state


def _not_a_file(path: Path, state: os.stat_result) -> str:
    what = KINDS[stat.S_IFMT(state.st_mode)]
    return f"{path} is {what}, where a run has a file of its own: move it away, or choose another run_dir"
