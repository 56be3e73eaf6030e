"""Replaces patterns among the paths of a loaded config, as `data/web/*`, by the prepared prefixes that they match.

That happens when a run's config is loaded, so that the run's own config.yaml and its checkpoints have the prefixes. A
pattern that matches nothing stays: a host that only plans or submits a run need not have its data, and opening it is an
error.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from data_pipeline.storage.paths import is_url

ENDING = ".idx"


def with_prefixes(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a config, unchecked, without patterns that match prepared data."""
    data = values.get("data")
    if not isinstance(data, dict):
        return values
    expanded = dict(_expanded(data))
    for name in ("sources", "validation"):
        if isinstance(sections := data.get(name), dict):
            expanded[name] = {key: _expanded(one) if isinstance(one, dict) else one for key, one in sections.items()}
    return values | {"data": expanded}


def _expanded(section: dict[str, Any]) -> dict[str, Any]:
    """Returns a section with prefixes as its `path`, each once, if there is a pattern in it."""
    path = section.get("path")
    paths = [path] if isinstance(path, str) else path
    if (
        not isinstance(paths, list)
        or not all(isinstance(one, str) for one in paths)
        or not any(map(_is_pattern, paths))
    ):
        return section
    return section | {"path": list(dict.fromkeys(prefix for one in paths for prefix in _prefixes(one)))}


def _is_pattern(path: str) -> bool:
    """True if a path has a wildcard, and is not the prefix of prepared data itself, nor a URL."""
    return glob.has_magic(path) and not is_url(path) and not Path(path + ENDING).exists()


def _prefixes(path: str) -> list[str]:
    """Returns the prefixes that match a path, sorted; the path itself if none does."""
    if not _is_pattern(path):
        return [path]
    return sorted(match.removesuffix(ENDING) for match in glob.glob(path + ENDING, recursive=True)) or [path]
