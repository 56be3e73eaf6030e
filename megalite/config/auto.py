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


def allow_in(schema: dict[str, Any]) -> None:
    """Allows `auto` in a JSON schema of configs wherever a config does."""
    for section, option in PLACEHOLDERS:
        options = _definition(schema, section)["properties"]
        options[option] = _or_auto(options[option])
    for section, option in ALONG:
        required = _definition(schema, section).get("required", [])
        if option in required:  # it may be left out where `parallel` is auto
            required.remove(option)
    for section in SECTIONS:
        schema["properties"][section] = _or_auto(schema["properties"][section])


def _definition(schema: dict[str, Any], section: str) -> dict[str, Any]:
    name = schema["properties"][section]["$ref"].rpartition("/")[2]
    definition: dict[str, Any] = schema["$defs"][name]
    return definition


def _or_auto(described: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {key: described[key] for key in ("title", "description", "default") if key in described}
    kind = {key: value for key, value in described.items() if key not in about}
    return {"anyOf": [kind, {"const": AUTO}], **about}
