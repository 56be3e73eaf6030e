"""Reads the files of other stacks: which stack wrote them, and each word with its value.

In: paths of a JSON, YAML or TOML file, of a shell script with `--flags`, or of a log that lists arguments. Out: one
`ForeignSetting` per word. Nothing is run: of a script, its variables are followed, and what only a run would tell stays
unknown.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from data_pipeline.path_suggestions import did_you_mean
from launch.errors import LaunchError
from launch.migration.shell import flags_of, listed_arguments
from megalite.config import ConfigError
from megalite.config.foreign_words import Kind, kind_of, leaves, not_translated, stack
from megalite.config.yaml_text import MOST_CHARACTERS, parse_yaml

TABLES: dict[Kind, tuple[str, ...]] = {
    "deepspeed": ("deepspeed",),
    "megatron_lm": ("megatron_lm", "megatron_deepspeed", "torchrun"),
    "gpt_neox": ("gpt_neox", "deepspeed"),
    "torchtitan": ("torchtitan",),
}
"""The tables that the words of a file are looked up in, first to last."""


@dataclass(frozen=True)
class ForeignSetting:
    """One word of a file, with its value."""

    word: str
    value: Any
    file: str
    kind: Kind
    is_dumped: bool = False
    """True in a list of all arguments, in which most have their defaults."""


def read_files(paths: Sequence[Path], kind: Kind | None) -> tuple[Kind, list[ForeignSetting], list[str]]:
    """Returns the stack of the files, their words in order, and sentences about what was not clear.

    A DeepSpeed JSON may stand beside the flags of Megatron-DeepSpeed. Raises LaunchError for files of several stacks.
    """
    settings: list[ForeignSetting] = []
    notes: list[str] = []
    kinds: dict[Kind, Path] = {}
    texts = {path: _text(path) for path in paths}
    mappings = {path: _mapping(path, text) for path, text in texts.items()}
    recognised = [one for values in mappings.values() if values and (one := kind_of(values))]
    for path, text in texts.items():
        values = mappings[path]
        of_file = kind or (kind_of(values) if values else None) or next(iter(recognised), None)
        found = list(_read(path, text, notes) if values is None else _settings(path, values, of_file))
        if not found:
            raise LaunchError(f"{path} has no words of another stack: give a script with --flags, JSON, YAML or TOML")
        kinds.setdefault(found[0].kind, path)
        settings.extend(found)
    if kinds.keys() == {"megatron_lm", "deepspeed"}:
        del kinds["deepspeed"]
    if len(kinds) > 1:
        names = ", ".join(f"{path} of {stack(one).name}" for one, path in kinds.items())
        raise LaunchError(f"files of several stacks ({names}): give those of one, or --kind")
    return next(iter(kinds)), settings, notes


def _read(path: Path, text: str, notes: list[str]) -> Iterator[ForeignSetting]:
    """Yields the words of a script or a log."""
    if arguments := listed_arguments(text):
        yield from (ForeignSetting(word, value, path.name, "megatron_lm", True) for word, value in arguments)
        return
    flags, embedded = flags_of(text, notes)
    yield from (ForeignSetting(word, value, path.name, "megatron_lm") for word, value in flags)
    for config in embedded:
        yield from (ForeignSetting(".".join(name), value, path.name, "deepspeed") for name, value in leaves(config))


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except IsADirectoryError:
        raise LaunchError(f"{path} is a folder: give its files") from None
    except FileNotFoundError:
        raise LaunchError(f"{path.absolute()} does not exist{did_you_mean(path)}: correct the path") from None
    if len(text) > MOST_CHARACTERS:
        raise LaunchError(f"{path} has more than {MOST_CHARACTERS:,} characters: give the part with the arguments")
    return text


def _mapping(path: Path, text: str) -> dict[str, Any] | None:
    """Returns the values of a JSON, YAML or TOML file; None for other text, such as a script."""
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            values = _json(text)
        elif path.suffix in (".yml", ".yaml"):
            values = parse_yaml(text)[0]
        else:
            return None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, ConfigError, RecursionError) as error:
        raise LaunchError(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}") from None
    if isinstance(values, str) and path.suffix == ".json":
        raise LaunchError(f"{path} is no JSON: {values[:60]!r}")
    if not isinstance(values, dict):
        raise LaunchError(f"{path} must hold names and values, but holds {type(values).__name__} data")
    return values


def _json(text: str) -> Any:
    """Returns the values of JSON, or of what DeepSpeed reads as JSON: with comments, or words without quotes."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        try:
            return parse_yaml(re.sub(r"(?m)^\s*//.*$", "", text).expandtabs())[0]
        except ConfigError:
            raise error from None


def _settings(path: Path, values: Mapping[str, Any], kind: Kind | None) -> Iterator[ForeignSetting]:
    if {"run_dir", "model", "training"} <= values.keys():
        raise LaunchError(f"{path} is a config of megalite already: `megalite config show {quote(str(path))}`")
    if other := not_translated(values):
        raise LaunchError(f"{path} is {other}")
    if kind is None:
        names = ", ".join(stack(one).name for one in TABLES)
        raise LaunchError(f"{path} is recognised as none of {names}: say which with --kind")
    if kind not in TABLES:
        words = "its words are in docs/coming_from.md, and `megalite config init` writes a first config"
        raise LaunchError(f"{path} is a config of {stack(kind).name}, which says nothing about model and data: {words}")
    flat = list(leaves(values))
    is_dumped = kind == "megatron_lm" and len(flat) > 100
    for name, value in flat:
        yield ForeignSetting(".".join(name), value, path.name, kind, is_dumped)


def kind_named(name: str | None) -> Kind | None:
    """Returns the stack that --kind names. Raises LaunchError for another name."""
    names: dict[str, Kind] = {"deepspeed": "deepspeed", "megatron": "megatron_lm", "neox": "gpt_neox"}
    if name is None:
        return None
    if name in names or (name in get_args(Kind) and name in TABLES):
        return names.get(name, name)  # type: ignore[arg-type]
    raise LaunchError(f"--kind {name}: give one of {', '.join(names)}, torchtitan")
