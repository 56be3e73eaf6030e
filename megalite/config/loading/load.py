"""Loads a checked `Config` from a YAML file and `section.option=value` overrides; every error is one line.

All errors are found in one go. Every message starts with the origin of the value: the file and line, or the override.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import ValidationError

from megalite.config.auto import AUTO, SECTIONS, spell_out
from megalite.config.config import Config
from megalite.config.deepspeed import without_refused
from megalite.config.errors import ConfigError, ConfigProblem, problems_of
from megalite.config.foreign_words import Kind, kind_of, not_translated, stack
from megalite.config.known_models import names_near, run_of
from megalite.config.loading.secrets_in_config import secret_in_override, secrets_among
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.config.path_or_url import problems_with_places
from megalite.config.rules.rules import broken_rules
from megalite.config.suggestions import OptionPath, dotted, named_as, nearest_path, option_paths
from megalite.config.yaml_text import MOST_CHARACTERS, LinePath, parse_yaml

Values = dict[str, Any]
MODEL_CONFIG = "config.json"  # of a Hugging Face folder
OTHERS = (".json", ".toml", ".sh", ".bash", ".slurm", ".sbatch")  # endings of other stacks' files
FOREIGN_WORD = re.compile(r'^\s*"(\w+)"\s*:|^\[(\w+)|(?<!\S)--([a-z][\w-]+)', re.MULTILINE)
OWN_SECTIONS = {"run_dir", "model", "data", "training"}  # DeepSpeed has a section `optimizer` too
OPTION_NAME = re.compile(r"(?<![a-z_])[a-z_]+(?:\.[a-z_]+)+")
COMMENT = re.compile(r"(?:^|\s)#")
OVERRIDE = re.compile(rf"((?:\w+\.)+\w+|{'|'.join(Config.model_fields)})=")


@dataclass(frozen=True)
class _Stated:
    """Values of a file and of overrides, without defaults and unchecked, with the origin of each."""

    path: Path
    values: Values
    lines: dict[LinePath, int]
    overrides: dict[OptionPath, str]  # the override that set an option
    problems: list[str]  # sentences about overrides that could not be applied

    def origin(self, option: OptionPath) -> str:
        """Returns the override or the line of the file that set `option` or the section around it."""
        for overridden, override in self.overrides.items():
            is_inside = option[: len(overridden)] == overridden
            is_created = overridden[: len(option)] == option and option not in self.lines  # a section without a line
            if is_inside or is_created:
                return f'override "{override}"'
        while option:
            if option in self.lines:
                return f"{self.path}, line {self.lines[option]}"
            option = option[:-1]
        return str(self.path)

    def origin_of_rule(self, sentence: str) -> str:
        """Returns the origin of the first option that a sentence about several options names, overrides first.

        What may be a URL is not repeated: it may have a credential in it that only its own rule knows.
        """
        named = options_named(sentence)
        for option in named:
            if override := self.overrides.get(option):
                hides = any(mark in override for mark in ":@")
                return f'override "{dotted(option)}=..."' if hides else f'override "{override}"'
        return next((self.origin(option) for option in named if option in self.lines), str(self.path))


def load_config(
    path: Path, overrides: Sequence[str] = (), complete: Callable[[Values], Values] = lambda values: values
) -> Config:
    """Loads the config in `path` with the overrides applied in order.

    `complete` may add values from elsewhere before they are checked, as the options of a Hugging Face model.
    An override is `section.option=value`, its value written as in YAML: `optimizer.learning_rate=1e-3`,
    `data.path=[a, b]`, `training.tokens=null`, `deepspeed.steps_per_print=100`.

    Raises ConfigError with a sentence for each problem if the config cannot work. What `complete` raises, a ValueError,
    is passed on where there is no other problem.
    """
    stated = _read_stated(path, overrides)
    try:
        completed = complete(stated.values)
    except ValueError as error:
        others = [*stated.problems, *_problems(stated, stated.values, but="model")]
        if others:
            raise ConfigError(str(error), *others) from None
        raise
    problems = [*stated.problems, *_problems(stated, completed)]
    if problems:
        raise ConfigError(*problems)
    return Config.model_validate(completed)


def load_saved_config(path: Path) -> Config:
    """Loads the config.yaml of a run, to be read alone, as `load_config` does.

    An older version may have written it, which took keys of DeepSpeed that are refused now: they are left out.
    """
    return load_config(path, complete=without_refused)


def stated_values(path: Path, overrides: Sequence[str] = ()) -> tuple[Values, frozenset[OptionPath]]:
    """Returns the values of file and overrides, without defaults and unchecked, and the options that overrides set."""
    stated = _read_stated(path, overrides)
    if stated.problems:
        raise ConfigError(*stated.problems)
    return stated.values, frozenset(stated.overrides)


def options_named(sentence: str) -> list[OptionPath]:
    """Returns the options of a config that a sentence names as `section.option`, in order."""
    found = [tuple(name.split(".")) for name in OPTION_NAME.findall(sentence)]
    return [option for option in found if option in named_as(option, option_paths(Config)) or option[0] == "deepspeed"]


def _rules_broken_by(config: Config) -> list[str]:
    dp = config.parallel.data_parallel_size
    return broken_rules(config, None if dp == "auto" else dp, device=None)


def _problems(stated: _Stated, values: Values, but: str = "") -> list[str]:
    """Returns a sentence for each option that is wrong, and for each rule about others that is broken.

    Options of the section `but` are not judged.
    """
    problems: list[ConfigProblem] = []
    try:
        broken = _rules_broken_by(Config.model_validate(values))
    except ValidationError as error:
        problems = [problem for problem in problems_of(error, Config) if problem.path[:1] != (but,)]
        broken = _rules_broken_besides(values, problems)
    return [
        *(f"{stated.origin(problem.path)}: {problem.sentence}" for problem in problems),
        *(f"{stated.origin_of_rule(rule)}: {rule}" for rule in broken),
    ]


def _rules_broken_besides(values: Values, problems: list[ConfigProblem]) -> list[str]:
    """Returns the broken rules about options without problems; one with a problem takes its default.

    Where a required option has a problem there is no config to check, so rules are checked once that is mended.
    """
    wrong = {option for problem in problems for option in (problem.path, problem.meant) if option}
    rest = copy.deepcopy(values)
    for option in wrong:
        section: Any = rest
        for name in option[:-1]:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(option[-1], None)
    try:
        config = Config.model_validate(rest)
    except ValidationError:
        return []
    named = ((rule, options_named(rule)) for rule in _rules_broken_by(config))
    return [rule for rule, about in named if not any(one[: len(path)] == path for one in about for path in wrong)]


def _read_stated(path: Path, overrides: Sequence[str]) -> _Stated:
    """Reads the file and applies the overrides. Raises ConfigError for secrets first: other sentences repeat values."""
    in_overrides = [sentence for override in overrides if (sentence := secret_in_override(override))]
    values, lines = _read(path)
    stated = _Stated(path, values, lines, {}, [])
    in_file = [f"{stated.origin(option)}: {sentence}" for option, sentence in secrets_among(values)]
    if in_overrides or in_file:
        raise ConfigError(*in_overrides, *in_file)
    malformed = []
    for override in overrides:
        name, equals, text = override.partition("=")
        option = tuple(name.strip().split("."))
        if not equals or not all(option):
            malformed.append(f'"{override}"')
            continue
        try:
            _set(values, option, _value_of(override, text), override)
        except ConfigError as error:
            stated.problems.extend(error.sentences)
        else:
            stated.overrides[option] = override
    stated.problems.extend(f"{stated.origin(option)}: {sentence}" for option, sentence in problems_with_places(values))
    if malformed:
        are = "override {} is" if len(malformed) == 1 else "overrides {} are"
        names = are.format(", ".join(malformed))
        configs = any(word.strip('"').endswith((".yaml", ".yml")) for word in malformed)
        remedy = "; a command takes one config, and what differs from it as overrides" * configs
        stated.problems.append(f"{names} not of the form section.option=value, in one word{remedy}")
    return stated


def _read(path: Path) -> tuple[dict[str, Any], dict[LinePath, int]]:
    if str(path) == path.name and not path.exists() and (values := run_of(path.name)) is not None:
        return values, {}
    text = _read_text(path)
    try:
        values, lines = parse_yaml(text)
    except ConfigError as error:
        if path.suffix in OTHERS:
            raise ConfigError(_of_another_stack(path, _kind_of_text(path, text))) from None
        raise ConfigError(
            *(f"{path}{', ' if said.startswith('line ') else ': '}{without_secrets(said)}" for said in error.sentences)
        ) from None
    if values is None:
        raise ConfigError(f"{path} is empty: it needs at least run_dir and the sections model, data and training")
    if not isinstance(values, dict) and path.suffix in OTHERS:
        raise ConfigError(_of_another_stack(path, _kind_of_text(path, text)))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections like `model:`, but holds {type(values).__name__} data")
    if path.name == MODEL_CONFIG and not values.keys().isdisjoint({"model_type", "architectures"}):
        raise ConfigError(f"{path} is a Hugging Face config: {_config_of_folder(path.parent)}")
    if not values.keys() & OWN_SECTIONS > {"training"} and (other := not_translated(values)):
        raise ConfigError(f"{path} is {other}")
    if values.keys().isdisjoint(OWN_SECTIONS) and (kind := kind_of(values.keys() - Config.model_fields)):
        raise ConfigError(_of_another_stack(path, kind))
    return values, lines


def _read_text(path: Path) -> str:
    wide = f"{path} is not UTF-8 text, it looks like UTF-16: save it as UTF-8"
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        if error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ConfigError(wide) from None
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(_unreadable(path, error)) from None
    if text[:4].count("\0") > 1:
        raise ConfigError(wide)
    return text


def _kind_of_text(path: Path, text: str) -> Kind | None:
    """Returns the stack of a file that is no YAML: of JSON with tabs, of TOML, or of a script with flags."""
    kind = kind_of({word for found in FOREIGN_WORD.findall(text) for word in found if word})
    return kind if kind is None or path.suffix in (".json", ".toml") else "megatron_lm"


def _of_another_stack(path: Path, kind: Kind | None) -> str:
    command = f"`megalite config from {quote(str(path))} -o config.yaml` writes one"
    if kind is None:
        return f"{path} is no config in YAML: {command} from a file of DeepSpeed, Megatron-LM, GPT-NeoX or torchtitan"
    return f"{path} is a config of {stack(kind).name}: {command} for megalite from it"


def _unreadable(path: Path, error: OSError) -> str:
    if override := OVERRIDE.match(str(path)):  # first, since its value may hold a secret
        name = without_secrets(override[1])
        return f'"{name}=..." stands where a config is needed: the config comes first, then overrides'
    if isinstance(error, FileNotFoundError):
        near = names_near(path.name) if str(path) == path.name and path.suffix not in (".yaml", ".yml", *OTHERS) else []
        meant = f"; of the models known by name, did you mean {' or '.join(near)}?" if near else ""
        return f"{path.absolute()} does not exist{nearest_path(path) or meant}"
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder: {_config_of_folder(path)}"
    return f"{path} cannot be read: {error.strerror}"


def _config_of_folder(folder: Path) -> str:
    """Returns how to come to the config of a run from a folder."""
    if (folder / MODEL_CONFIG).is_file():
        return f"write a config for the model with `megalite config init --from {quote(str(folder))} -o config.yaml`"
    return f"give {folder / 'config.yaml'}" if (folder / "config.yaml").is_file() else "give a config in YAML"


def _value_of(override: str, text: str) -> Any:
    try:
        value = parse_yaml(text)[0]
        if _has_comment(text, value):
            raise ConfigError('" #" begins a comment in YAML, so the rest would be lost: put the value into quotes')
        return value
    except ConfigError as error:
        sentences = (sentence.removeprefix("line 1: ") for sentence in error.sentences)
        raise ConfigError(*(f'override "{override}": {sentence}' for sentence in sentences)) from None


def _has_comment(text: str, value: Any) -> bool:
    """Returns whether the value of an override ends in a comment, as that of `run_dir=runs/try #2` does."""
    if (mark := COMMENT.search(text)) is None:
        return False
    try:
        return parse_yaml(text[: mark.start()])[0] == value
    except ConfigError:  # it stands in quotes
        return False


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
