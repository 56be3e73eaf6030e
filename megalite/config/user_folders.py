"""The folders of this process's user, also where there is no home, or none that can be written. No torch."""

from __future__ import annotations

import getpass
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def ensure_home() -> None:
    """Gives this process and its children a HOME, a place for caches and a name of the user where it has none.

    A container may run as a number that /etc/passwd does not know, with no HOME or with `/`: matplotlib, torch's
    compilers, the clients of hubs and our own caches would complain or end in a traceback. A home that is there and
    cannot be written stays, because it may hold settings, and caches go elsewhere.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.expanduser raises where there is none
    with suppress(OSError):  # no temporary folder either: who needs one says so
        if not home.is_absolute() or not may_be_written(home):
            if not home.is_absolute() or home == Path("/") or not home.is_dir():
                os.environ["HOME"] = str(_temporary_folder())
            else:
                os.environ.setdefault("XDG_CACHE_HOME", str(_temporary_folder()))
                os.environ.setdefault("MPLCONFIGDIR", str(_temporary_folder() / "matplotlib"))
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = str(os.getuid())


def expanded_home(path: str) -> str:
    """Returns a path with the home folder in the place of `~`, as a shell does."""
    return os.path.expanduser(path)  # noqa: PTH111


def cache_folder() -> Path:
    """Returns the folder of what is kept between runs and can be made again; it need not exist."""
    return _folder("XDG_CACHE_HOME", ".cache")


def settings_folder() -> Path:
    """Returns the folder of the user's own files about megalite, which need not exist."""
    return _folder("XDG_CONFIG_HOME", ".config")


def _folder(variable: str, below_home: str) -> Path:
    ensure_home()
    root = Path(os.environ.get(variable, ""))
    if not root.is_absolute():  # relative paths are to be ignored, says the XDG specification
        root = Path(os.path.expanduser("~"), below_home)  # noqa: PTH111
    return root.absolute() / "megalite"


def may_be_written(folder: Path) -> bool:
    """Returns whether files can be made in a folder, or the folder can be made."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    is_kernels = any(there.is_relative_to(place) for place in ("/proc", "/sys"))  # whose rights say nothing to root
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK) and not is_kernels


def _temporary_folder() -> Path:
    """Makes a folder that is this user's alone: compiled code in it is run. The same one next time, if it can be."""
    folder = Path(tempfile.gettempdir(), f"megalite_{os.getuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="megalite_"))
