"""Options that a config leaves to the planner: they are `auto`, and a layout is chosen when the run starts.

In: the values of a file. Out: values that a `Config` can be built from, with placeholders for the options still to be
chosen, and the paths of those options. Every placeholder is the simplest value, legal wherever any value is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megalite.config.suggestions import OptionPath

AUTO = "auto"

PLACEHOLDERS: dict[OptionPath, Any] = {
    ("parallel", "tensor_parallel_size"): 1,
    ("parallel", "pipeline_parallel_size"): 1,
    ("parallel", "pipeline_schedule"): "1f1b",
    ("parallel", "sequence_parallel"): False,
    ("parallel", "zero_stage"): 1,
    ("training", "micro_batch_size"): 1,
    ("recompute", "mode"): "none",
}
"""Every option that may be `auto`, and its value until one is chosen. `parallel.data_parallel_size` is not among them:
its `auto` becomes a number as soon as the number of processes is known."""

CHOOSABLE = frozenset(PLACEHOLDERS)
SECTIONS = ("parallel", "recompute")
"""Sections that may be `auto` as a whole."""

ALONG = (("training", "micro_batch_size"), ("recompute", "mode"))
"""Options that are chosen too if an option of `parallel` is `auto` and they are left out."""


def spell_out(section: str) -> dict[str, Any]:
    """Returns the options that `section: auto` stands for."""
    return {option: AUTO for home, option in PLACEHOLDERS if home == section}


def take_out(values: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[OptionPath]]:
    """Replaces every `auto` by its placeholder; also returns the options that were `auto`."""
    result = {name: spell_out(name) if name in SECTIONS and value == AUTO else value for name, value in values.items()}
    sections = {name: {} if result.get(name) is None else result[name] for name, _ in PLACEHOLDERS}
    stated = {path: sections[path[0]].get(path[1]) for path in PLACEHOLDERS if isinstance(sections[path[0]], dict)}
    found = {path for path, value in stated.items() if value == AUTO}
    if any(section == "parallel" for section, _ in found):
        found |= {path for path in ALONG if path in stated and path[1] not in sections[path[0]]}
    for section, option in found:
        result[section] = {**(result.get(section) or {}), option: PLACEHOLDERS[section, option]}
    return result, frozenset(found)


def put_back(values: dict[str, Any], options: Iterable[OptionPath]) -> dict[str, Any]:
    """Undoes `take_out` in a dump: sets `options` to `auto`."""
    for section, option in options:
        if isinstance(values.get(section), dict):
            values[section] = {**values[section], option: AUTO}
    return values
