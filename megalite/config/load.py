"""From a YAML file and `section.option=value` overrides to a checked `Config`; all errors are one line.

Every message starts with where the value came from: the file and line, or the override.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.config.auto import AUTO, SECTIONS, spell_out
from megalite.config.errors import ConfigError, one_line, problems_of
from megalite.config.nearest import OptionPath, dotted
from megalite.config.root import Config
from megalite.config.rules import Situation, check_rules
from megalite.config.text import LinePath, parse_yaml

Values = dict[str, Any]


def load_config(
    path: Path, overrides: Sequence[str] = (), complete: Callable[[Values], Values] = lambda values: values
) -> Config:
    """The config in `path` with the overrides applied in order; ConfigError where it cannot work.

    `complete` may add to the values before they are checked: what stands elsewhere, as a Hugging Face model's options.
    An override is `section.option=value`, its value written as in YAML: `optimizer.learning_rate=1e-3`,
    `data.path=[a, b]`, `training.tokens=null`, `deepspeed.zero_optimization.overlap_comm=true`.
    """
    values, lines, sources = _overridden(path, overrides)
    try:
        config = Config.model_validate(complete(values))
    except ValidationError as error:
        problems = problems_of(error, Config)
        where = _where(path, problems[0].path, lines, sources)
        raise ConfigError(f"{where}: {one_line(problem.sentence for problem in problems)}") from None
    dp = config.parallel.data_parallel_size
    try:
        check_rules(config, Situation(None if dp == "auto" else dp, device=None))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def stated_values(path: Path, overrides: Sequence[str] = ()) -> tuple[Values, frozenset[OptionPath]]:
    """What file and overrides say, nothing filled in and nothing checked, and which options the overrides set."""
    values, _, sources = _overridden(path, overrides)
    return values, frozenset(sources)


def _overridden(path: Path, overrides: Sequence[str]) -> tuple[Values, dict[LinePath, int], dict[OptionPath, str]]:
    """The file's values with the overrides applied, its lines, and the override behind each option that one set."""
    values, lines = _read(path)
    sources: dict[OptionPath, str] = {}
    for override in overrides:
        option, value = _parse_override(override)
        _set(values, option, value, override)
        sources[option] = override
    return values, lines, sources


def _read(path: Path) -> tuple[dict[str, Any], dict[LinePath, int]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        values, lines = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if values is None:
        raise ConfigError(f"{path} is empty: it needs at least run_dir and the sections model, data and training")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections like `model:`, but holds {type(values).__name__} data")
    return values, lines


def _parse_override(override: str) -> tuple[OptionPath, Any]:
    name, equals, text = override.partition("=")
    option = tuple(name.strip().split("."))
    if not equals or not all(option):
        raise ConfigError(f'override "{override}" is not of the form section.option=value')
    try:
        value, _ = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f'override "{override}": {str(error).removeprefix("line 1: ")}') from None
    return option, value


def _set(values: dict[str, Any], option: OptionPath, value: Any, override: str) -> None:
    """Sets one option in nested dicts, making the sections on the way."""
    here = values
    for depth, name in enumerate(option[:-1], start=1):
        if here.get(name) is None:
            here[name] = {}
        if here[name] == AUTO and option[:depth] in {(section,) for section in SECTIONS}:
            here[name] = spell_out(name)  # `parallel: auto`, but for one option
        here = here[name]
        if not isinstance(here, dict):
            above = dotted(option[:depth])
            raise ConfigError(
                f'override "{override}": {above} is a value, not a section; write {above}=... to change it'
            )
    here[option[-1]] = value


def _where(path: Path, option: OptionPath, lines: dict[LinePath, int], sources: dict[OptionPath, str]) -> str:
    """The override or the line of the file that a problem with `option` comes from."""
    for overridden, override in sources.items():
        inside = option[: len(overridden)] == overridden
        made_by_it = overridden[: len(option)] == option and option not in lines
        if inside or made_by_it:
            return f'override "{override}"'
    while option:
        if option in lines:
            return f"{path}, line {lines[option]}"
        option = option[:-1]
    return str(path)
