"""Paths, prefixes and URLs as people type them, and sizes in bytes as people read them."""

import os
import re
from pathlib import Path

from data_pipeline.errors import DataError

_ENDINGS = (".bin", ".idx", ".meta.json")


def with_ending(prefix: Path, ending: str) -> Path:
    """Returns PREFIX + ending; unlike Path.with_suffix it keeps dots inside the prefix."""
    return prefix.parent / (prefix.name + ending)


def is_url(text: str) -> bool:
    """True for `https://...`, `s3://...` and the like."""
    return bool(re.match(r"[A-Za-z][\w+.-]*://", text))


def decimal_size(size: float) -> str:
    """Returns a number of bytes with an SI prefix, such as `1.2 MB`."""
    for unit, digits in (("byte" if size == 1 else "bytes", 0), ("kB", 1), ("MB", 1), ("GB", 1)):
        if round(size, digits) < 1000:
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def user_path(name: str) -> Path:
    """Returns the path that a user means: `~/` is the home folder, and `~notes.txt` a file where no user is it."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises where it finds no home


def output_prefix(given: str) -> Path:
    """Returns the prefix of OUTPUT.bin and its companions. Raises DataError for words that name no such files.

    Takes the words as typed: a `Path` no longer has an ending slash, nor the two of a URL.
    """
    if is_url(given):
        raise DataError(f"-o {given} is a URL, to which nothing is written: give a local prefix, such as data/text")
    name = given.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise DataError(f"-o {given or repr(given)} names no file: give a prefix, such as {Path(given) / 'text'}")
    for ending in _ENDINGS:
        if name.endswith(ending):
            prefix = given.removesuffix(ending)
            raise DataError(f"-o {given}: a prefix has no ending: give {prefix if name != ending else 'data/text'}")
    for folder in Path(given).parents:
        if folder.is_dir():
            break
        if folder.exists():
            raise DataError(f"-o {given}: {folder} is a file, not a folder: choose another prefix")
    return Path(given)
