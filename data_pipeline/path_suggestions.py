"""Suggests what was probably meant by a path that does not exist, of data or of any command."""

from collections.abc import Collection
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

_MOST_NAMES = 10_000  # of a folder that are compared with one


def did_you_mean(path: Path, ending: str = "", *, also: Collection[str] = ()) -> str:
    """Returns words about what was probably meant by a path that does not exist, beside it or beside a folder above it.

    `ending`: of the files that are meant, whose names are given without it; `also`: names that are no files.
    """
    if path.is_symlink():
        return f" (it is a link to {path.readlink()}, which is not there)"
    there = path.parent
    if not there.exists():
        return did_you_mean(there) if there != there.parent else ""
    with suppress(OSError):
        found_names = (one.name for one in islice(there.iterdir(), _MOST_NAMES))
        names = [name.removesuffix(ending) for name in found_names if name.endswith(ending)]
        if found := get_close_matches(path.name, [*names, *also], n=1, cutoff=0.75):
            return f" (did you mean {found[0] if found[0] in also else there / found[0]}?)"
    return ""
