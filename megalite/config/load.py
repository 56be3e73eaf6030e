"""Loads a checked `Config` from a YAML file and `section.option=value` overrides; all errors are one line.

Every message starts with the origin of the value: the file and line, or the override.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megalite.config.auto import AUTO, SECTIONS, spell_out
from megalite.config.config import Config
from megalite.config.errors import ConfigError, one_line, problems_of
from megalite.config.rules import check_rules
from megalite.config.suggestions import OptionPath, dotted
from megalite.config.yaml_text import LinePath, parse_yaml

Values = dict[str, Any]


def load_config(
    path: Path, overrides: Sequence[str] = (), complete: Callable[[Values], Values] = lambda values: values
) -> Config:
    """Loads the config in `path` with the overrides applied in order. Raises ConfigError if it cannot work.

    `complete` may add values from elsewhere before they are checked, as the options of a Hugging Face model.
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
        check_rules(config, None if dp == "auto" else dp, device=None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def stated_values(path: Path, overrides: Sequence[str] = ()) -> tuple[Values, frozenset[OptionPath]]:
    """Returns the values of file and overrides, without defaults and unchecked, and the options that overrides set."""
    values, _, sources = _overridden(path, overrides)
    return values, frozenset(sources)


def _overridden(path: Path, overrides: Sequence[str]) -> tuple[Values, dict[LinePath, int], dict[OptionPath, str]]:
    """Returns the file's values with the overrides applied, its lines, and the override of each overridden option."""
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
    """Sets one option in nested dicts and creates the sections on the way."""
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
    """Returns the override or the line of the file that set `option`."""
    for overridden, override in sources.items():
        is_inside = option[: len(overridden)] == overridden
        is_created = overridden[: len(option)] == option and option not in lines  # a section without a line
        if is_inside or is_created:
            return f'override "{override}"'
    while option:
        if option in lines:
            return f"{path}, line {lines[option]}"
        option = option[:-1]
    return str(path)
