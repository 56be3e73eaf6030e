"""Keeps the current folder off the import path of this process and of every Python that it starts.

A folder that somebody has downloaded may hold a `torch` or a `deepspeed` of its own, which Python would take first.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

from launch.runtime.started_modules import INSTALLATION

PYTHON_PATH = "PYTHONPATH"
SAFE_PATH = "PYTHONSAFEPATH"  # Python puts neither the current folder nor that of a script on its path
# a folder of installed packages is on the path anyway, and in front it would hide modules of the standard library
CHECKOUT = [] if INSTALLATION.name in ("site-packages", "dist-packages") else [str(INSTALLATION)]


def exclude_current_folder() -> str | None:
    """Takes the current folder from `sys.path`, and from the environment of the processes that this one will start.

    Call it in the first lines of a program, before anything else is imported. A checkout that is the current folder and
    where this code runs from stays on the path. Returns a sentence about entries of PYTHONPATH that are left out,
    because they are empty or relative, which means the current folder or one in it; None if there are none.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # it has been removed, so nothing can be loaded from it
        here = os.devnull
    written = os.environ.get(PYTHON_PATH, "")
    entries = written.split(os.pathsep) if written else []
    kept = [entry for entry in entries if Path(entry).is_absolute()]
    left_out = {os.path.normpath(Path(here, entry)): entry for entry in entries if entry not in kept}
    is_first = not sys.flags.safe_path and sys.path[0] in ("", here)  # under `python -m`
    if str(INSTALLATION) in {*left_out, *([here] if is_first else [])}:
        left_out.pop(str(INSTALLATION), None)
        kept.insert(0, str(INSTALLATION))
    elif is_first:
        del sys.path[0]
    for folder in left_out.keys() - {*kept, *site.getsitepackages()}:
        if folder in sys.path:
            sys.path.remove(folder)
    os.environ.setdefault(SAFE_PATH, "1")
    if kept or written:
        os.environ[PYTHON_PATH] = os.pathsep.join(kept)  # an empty one is none to Python
    if not left_out:
        return None
    names = ", ".join(entry or "an empty entry" for entry in left_out.values())
    return (
        f"{PYTHON_PATH} has {names}, which means the current folder or one in it, and no code is loaded from there: "
        "write full paths, or take it out"
    )


def import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with which a Python on any host finds this code, and the full paths in its PYTHONPATH alone."""
    entries = [entry for entry in environment.get(PYTHON_PATH, "").split(os.pathsep) if Path(entry).is_absolute()]
    return {PYTHON_PATH: os.pathsep.join(dict.fromkeys([*CHECKOUT, *entries])), SAFE_PATH: "1"}
