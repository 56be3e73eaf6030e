"""Versions of megalite and of other packages, also where some are not installed. No torch."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NAME = "megalite"


@cache
def own_version() -> str:
    """Returns the version of the code that runs: that of its checkout, or else of the installed package.

    A checkout need not be installed: one that is carried to another machine has no metadata. Where it is, the metadata
    may be those of an older state.
    """
    try:
        project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
        if project["name"] == NAME:
            return str(project["version"])
    except (OSError, ValueError, KeyError, TypeError):  # not beside a pyproject.toml of ours
        pass
    return installed_version(NAME) or "unknown"


def installed_version(package: str) -> str | None:
    """Returns the version of a package without importing it; None where it has no metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
