"""Tells URLs from paths in a config, since a `Path` merges a URL's slashes; refuses paths that a shell would change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.config.foreign_words import leaves
from megalite.config.user_folders import expanded_home

PLACES = {"run_dir", "path", "initialize_from", "mirror", "cache", "textfile"}
"""Names of the options, in whatever section, that hold paths or URLs."""
VARIABLE = re.compile(r"(?:^|/)\$(?:[A-Za-z_]|\{)")  # a part of a path; a name may hold a $ elsewhere
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")  # one letter before the colon is no protocol


def url_of(path: Path) -> str | None:
    """Returns the URL that somebody gave for a path, with its two slashes; None if it is a path."""
    found = URL.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found else None


def problems_with_places(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the options whose paths a shell would have changed, `~/runs` or `$HOME/runs`, each with a message.

    They would be folders of these names here. A cache alone may begin with `~`, the home folder of each host.
    """
    for option, value in leaves(values):
        for place in (value if isinstance(value, list) else [value]) if option[-1] in PLACES else []:
            name, text = ".".join(option), str(place)
            protocol, local = re.fullmatch(r"(file:///?(?=~))?(.*)", text, re.DOTALL).groups("")  # type: ignore[union-attr]
            if VARIABLE.search(text):
                yield option, f"{name} {text}: variables are not expanded here: write the whole path"
            elif local.startswith("~") and (home := expanded_home(local)) != local and option[-1] != "cache":
                yield option, f"{name} {text}: ~ is not expanded here: write {protocol[:7]}{home}"


def local_run_dir(path: Path) -> Path:
    """Returns `path`. Raises ValueError if it is a URL: a run writes to a local folder."""
    if url := url_of(path):
        raise ValueError(
            f"run_dir {url} is a URL: give a local folder, and checkpoint.mirror={url} for a copy of the checkpoints"
        )
    return path
