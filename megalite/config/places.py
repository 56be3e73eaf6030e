"""Tells a URL from a path of this machine: a `Path` merges the two slashes of a URL, which looks like a path then."""

from __future__ import annotations

import re
from pathlib import Path

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")  # one letter before the colon is no protocol


def url_of(path: Path) -> str | None:
    """Returns the URL that somebody gave for a path, with its two slashes; None if it is a path."""
    found = URL.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found else None


def local_run_dir(path: Path) -> Path:
    """Returns `path`. Raises ValueError if it is a URL: a run writes to a local folder."""
    if url := url_of(path):
        raise ValueError(
            f"run_dir {url} is a URL: give a local folder, and checkpoint.mirror={url} for a copy of the checkpoints"
        )
    return path
