"""Options that a config leaves to the planner: they are `auto`, and a layout is chosen when the run starts.

In: the values of a file. Out: values that a `Config` can be built from, with placeholders for the options still to be
chosen, and the paths of those options. Every placeholder is the simplest value, legal wherever any value is. A pipeline
schedule that is left out is `auto` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megalite.config.suggestions import OptionPath

AUTO = "auto"
PIPELINE: OptionPath = ("parallel", "pipeline_parallel_size")
SCHEDULE: OptionPath = ("parallel", "pipeline_schedule")
CONTEXT: OptionPath = ("parallel", "context_parallel_size")
EXPERT: OptionPath = ("parallel", "expert_parallel_size")
WIRE: OptionPath = ("precision", "gradient_reduction_dtype")

PLACEHOLDERS: dict[OptionPath, Any] = {
    ("parallel", "tensor_parallel_size"): 1,
    PIPELINE: 1,
    SCHEDULE: "1f1b",
    CONTEXT: 1,
    EXPERT: 1,
    ("parallel", "sequence_parallel"): False,
    ("parallel", "zero_stage"): 1,
    ("training", "micro_batch_size"): 1,
    ("recompute", "mode"): "none",
}
"""Every option that may be `auto`, and its value until one is chosen. `parallel.data_parallel_size` is not among them:
its `auto` becomes a number as soon as the number of processes is known."""

CHOOSABLE = frozenset(PLACEHOLDERS)
OPEN: dict[OptionPath, Any] = {SCHEDULE: PLACEHOLDERS[SCHEDULE], WIRE: None}
"""Options that may stay `auto` while the layout is stated, and what commands take that train nothing."""

SECTIONS = ("parallel", "recompute")
"""Sections that may be `auto` as a whole."""

ALONG = (("training", "micro_batch_size"), ("recompute", "mode"))
"""Options that are chosen too if a size of `parallel` is `auto` and they are left out."""
LEFT_OUT = object()


def spell_out(section: str) -> dict[str, Any]:
    """Returns the options that `section: auto` stands for."""
    return {option: AUTO for home, option in PLACEHOLDERS if home == section}


def take_out(values: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[OptionPath]]:
    """Replaces every `auto` by its placeholder; also returns the options that were `auto`."""
    result = {name: spell_out(name) if name in SECTIONS and value == AUTO else value for name, value in values.items()}
    options = PLACEHOLDERS | OPEN
    sections = {name: {} if result.get(name) is None else result[name] for name, _ in options}
    stated = {path: sections[path[0]].get(path[1], LEFT_OUT) for path in options if isinstance(sections[path[0]], dict)}
    found = {path for path, value in stated.items() if value == AUTO}
    if any(section == "parallel" for section, _ in found - {SCHEDULE}):
        found |= {path for path in ALONG if stated.get(path) is LEFT_OUT}
    if stated.get(SCHEDULE) is LEFT_OUT:
        found.add(SCHEDULE)
    for section, option in found:
        result[section] = {**(result.get(section) or {}), option: options[section, option]}
    return result, frozenset(found)


def put_back(values: dict[str, Any], options: Iterable[OptionPath]) -> dict[str, Any]:
    """Undoes `take_out` in a dump: sets `options` to `auto`."""
    for section, option in options:
        if isinstance(values.get(section), dict):
            values[section] = {**values[section], option: AUTO}
    return values
