"""Turns the words of another stack's files into options, by the tables of megalite/config/stacks.

In: `ForeignSetting`s. Out: the options of a config, a line for each word that says what became of it, and all
contradictions. What a word left out means there is an option too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import ValidationError

from launch.migration.derivation import Quantities
from launch.migration.quantities import derive
from launch.migration.reading import TABLES, ForeignSetting
from megalite.config import Config, ConfigError
from megalite.config.deepspeed import problems_with_keys
from megalite.config.documentation.starter import starting_value
from megalite.config.errors import problems_of, shown
from megalite.config.foreign_words import Kind, WordRow, normal_form, stack
from megalite.config.loading.secrets_in_config import secrets_among
from megalite.config.loading.secrets_in_text import names_secret, without_secrets
from megalite.config.model import ModelConfig
from megalite.config.rules.rules import broken_rules
from megalite.config.suggestions import OptionPath, dotted, option_paths
from megalite.config.yaml_text import parse_yaml
from models.families import FAMILIES
from models.hub.config_parts import FamilyError

OVERRIDE = "say it at the end of the command as section.option=value, which takes the place of what the files say"
AUTO = "auto"  # of Hugging Face's Trainer: "as in TrainingArguments"
SET_BY_US = (
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "contiguous_gradients"),
    "round_robin_gradients",
)
"""Keys of `zero_optimization` that every run sets as its ZeRO stage needs them."""
OFFLOAD = "zero_optimization.offload_optimizer"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
REQUIRED: tuple[OptionPath, ...] = (
    ("run_dir",),
    *(("model", size) for size in SIZES),
    ("data", "path"),
    *(("training", name) for name in ("global_batch_size", "micro_batch_size", "sequence_length", "steps")),
)
INSTEAD = {"data.path": "data.sources", "training.steps": "training.tokens"}
INSTEAD |= {other: option for option, other in INSTEAD.items()}
"""Options of which a config has one, and the other of each."""
OUTCOMES = ("taken", "another thing here", "left out there", "yours to set", "nothing to set", "not here", "unknown")


class Became(NamedTuple):
    """A line of the table: what became of a word."""

    word: str
    value: str
    outcome: str
    """One of `OUTCOMES`."""
    here: str


@dataclass
class MigratedConfig:
    """A config from another stack's files."""

    options: dict[str, Any] = field(default_factory=dict)
    """Option -> value."""
    lines: list[Became] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    """Required options that the files do not tell, with a first value."""

    def values(self) -> dict[str, Any]:
        """Returns the options as nested sections, in the order of the config's."""
        nested: dict[str, Any] = {}
        order = {dotted(path): place for place, path in enumerate(option_paths(Config))}
        for option, value in sorted(self.options.items(), key=lambda item: order.get(item[0], len(order))):
            path = option.split(".")
            here = nested
            for name in path[:-1]:
                here = here.setdefault(name, {})
            here[path[-1]] = value
        return {name: nested[name] for name in Config.model_fields if name in nested}


def migrate(kind: Kind, settings: Sequence[ForeignSetting], overrides: Sequence[str]) -> MigratedConfig:
    """Returns the config of the settings, of what is left out, and of overrides `section.option=value`.

    Raises ConfigError with a sentence for each contradiction.
    """
    migrated = MigratedConfig()
    stated, problems = _overrides(overrides)
    quantities = Quantities({}, kind)
    if not any(each.is_dumped for each in settings):
        _take_defaults(kind, {normal_form(each.word): each.value for each in settings}, migrated, quantities)
    for each in settings:
        _apply(each, migrated, quantities)
    migrated.options |= stated
    stated_instead = {other for option, other in INSTEAD.items() if option in stated}
    derived, found, notes = derive(quantities, migrated.options)
    migrated.options |= {option: value for option, value in derived.items() if option not in {*stated, *stated_instead}}
    for word, value, here in notes:
        migrated.lines = [line for line in migrated.lines if line.word != word or not word]
        migrated.lines.append(Became(word, value, "another thing here", here))
    _leave_out_useless(migrated)
    _fill(migrated)
    problems += found
    problems += _broken(migrated) if not found else []
    if problems:
        raise ConfigError(*dict.fromkeys(problems), "nothing was written: correct the files, or " + OVERRIDE)
    return migrated


def _take_defaults(kind: Kind, stated: Mapping[str, Any], migrated: MigratedConfig, quantities: Quantities) -> None:
    """Takes the values that words have there which the files leave out."""
    for word, value in stack(kind).defaults.items():
        row = _row_of(word, TABLES[kind])
        assert row is not None, f"{word} has no row"
        if any(stated.get(name) == AUTO for name in row.words):
            continue  # the Trainer would fill it in, whatever is the default
        spelled = next(name for name in row.there.replace("`", "").split(", ") if normal_form(name) == word)
        _take(ForeignSetting(spelled, value, "", kind), row, migrated, quantities)
        if stated.keys().isdisjoint(row.words) and value not in (False, None):
            migrated.lines.append(Became(spelled, _text(value), "left out there", row.in_words))


def _text(value: Any) -> str:
    """Returns a value for the table: as in the file, shortened and without secrets."""
    value = without_secrets(value)
    return value if isinstance(value, str) and len(value) <= 60 else shown(value)


def _overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    stated, problems = {}, []
    for override in overrides:
        option, equals, text = override.partition("=")
        if not equals:
            problems.append(f'"{override}" is no file, nor is it of the form section.option=value')
            continue
        stated[option] = parse_yaml(text)[0]
    return stated, problems


def _row_of(word: str, tables: Sequence[str]) -> WordRow | None:
    """Returns the row of a word, or of the section that it stands in."""
    name = normal_form(word)
    while name:
        for table in tables:
            for row in stack(table).rows:
                if name in row.words:
                    return row
        name = name.rpartition(".")[0]
    return None


def _apply(each: ForeignSetting, migrated: MigratedConfig, quantities: Quantities) -> None:
    """Takes one word, and adds the line that says what became of it."""
    word, value = normal_form(each.word), each.value
    row = _row_of(word, TABLES[each.kind])

    def became(outcome: str, here: str) -> None:
        shown_value = "***" if names_secret(each.word) and isinstance(value, str) else _text(value)
        migrated.lines.append(Became(each.word, "" if value is True else shown_value, outcome, here))

    if each.is_dumped and (value in (None, False) or row is None):
        if row is None and value not in (None, False):
            became("unknown", "no row in docs/coming_from.md")
        return
    if value == AUTO:
        if row is not None and "precision.dtype" in row.options:
            quantities.put("dtype_is_left", True, each.word)
        became("yours to set", f"{row.in_words if row else 'unknown'}: the Trainer would fill it in")
    elif any(mark in str(value) for mark in ("$", "`")):
        became("yours to set", f"{row.in_words if row else 'unknown'}: the script knows it only when it runs")
    elif word.startswith("zero_optimization.") and (row is None or word not in row.words):
        became(*_zero_option(word, value, migrated))
    elif row is None:
        problems = dict(problems_with_keys(_nested(word, value))) if each.kind in ("deepspeed", "gpt_neox") else {}
        is_passed = each.kind in ("deepspeed", "gpt_neox") and not problems
        if is_passed:
            migrated.options[f"deepspeed.{word}"] = value
        became(*(("taken", f"deepspeed.{word}") if is_passed else ("unknown", "no row in docs/coming_from.md")))
    else:
        became(*_take(each, row, migrated, quantities))


def _nested(word: str, value: Any) -> dict[str, Any]:
    for name in reversed(word.split(".")):
        value = {name: value}
    return value


def _zero_option(word: str, value: Any, migrated: MigratedConfig) -> tuple[str, str]:
    """Takes a key of DeepSpeed's `zero_optimization` that has no row of its own."""
    name = word.removeprefix("zero_optimization.")
    if name in SET_BY_US:
        return "nothing to set", f"every run sets it as its ZeRO stage needs it (deepspeed.{word} would set it)"
    if word == "zero_optimization.cpu_offload" or (word == f"{OFFLOAD}.device" and value in ("cpu", "none")):
        if value not in (True, "cpu"):
            return "nothing to set", "off there (offload.optimizer)"
        migrated.options["offload.optimizer"] = "cpu"
        return "taken", "offload.optimizer"
    if word.startswith(f"{OFFLOAD}.") and migrated.options.get("offload.optimizer") is not None:
        return "nothing to set", "memory of an offloaded optimizer is pinned"
    if problems := dict(problems_with_keys(_nested(word, value))):
        return "not here", next(iter(problems.values()))
    migrated.options[f"deepspeed.{word}"] = value
    return "taken", f"deepspeed.{word}"


def _take(each: ForeignSetting, row: WordRow, migrated: MigratedConfig, quantities: Quantities) -> tuple[str, str]:
    """Puts a value where its row says, and returns what became of it."""
    value, here = each.value, row.in_words
    if value is None:
        return "nothing to set", f"null: left out ({here})"
    if row.take is None or (normal_form(each.word) not in row.words):
        return _not_taken(each, here)
    if isinstance(row.take, Mapping):
        known = {str(name).lower(): settings for name, settings in row.take.items()}
        settings = known.get(str(value).lower(), known.get("*"))
        if settings is None:
            is_off = value is False or str(value).lower() == "false"
            return ("nothing to set", f"off there ({here})") if is_off else (
                "not here", f"{shown(value)} has no counterpart: {here} has {', '.join(known)}"
            )  # fmt: skip
        migrated.options |= settings
        return "taken", ", ".join(f"{option} {_text(one)}" for option, one in settings.items())
    if row.take == "deepspeed" or "." in row.take:
        option = f"deepspeed.{normal_form(each.word)}" if row.take == "deepspeed" else row.take
        migrated.options[option] = value
        return "taken", option
    quantities.put(row.take, value, each.word)
    return ("nothing to set", here.removeprefix("nothing: ")) if here.startswith("nothing") else ("taken", here)


def _not_taken(each: ForeignSetting, here: str) -> tuple[str, str]:
    is_one = each.value in (1, 0, False) and any(part in each.word for part in ("size", "degree", "parallel"))
    if here.startswith("nothing"):
        return "nothing to set", here.removeprefix("nothing").removeprefix(": ") or "nothing"
    if here.startswith(("not here", "removed")):
        return ("nothing to set", f"off there ({here})") if is_one or each.value is False else ("not here", here)
    return ("nothing to set", f"off there ({here})") if each.value is False else ("yours to set", here)


def _leave_out_useless(migrated: MigratedConfig) -> None:
    """Leaves out the loss scale of fp16 where another format is used, which has none."""
    if migrated.options.get("precision.dtype") == "fp16":
        return
    for option in [name for name in migrated.options if name.startswith("deepspeed.fp16.")]:
        del migrated.options[option]
        word = option.removeprefix("deepspeed.")
        lines = [line for line in migrated.lines if line.word != word]
        if len(lines) < len(migrated.lines):
            lines.append(Became(word, "", "nothing to set", "a loss scale is for fp16 alone"))
        migrated.lines = lines


def _fill(migrated: MigratedConfig) -> None:
    """Gives options that a run needs and the files do not tell a first value, and names the model's family."""
    options = migrated.options
    for path in REQUIRED:
        option = dotted(path)
        if path[0] == "model" and "training.initialize_from" in options:
            continue
        instead = INSTEAD.get(option, option)
        if option not in options and not any(name.startswith(instead) for name in options):
            options[option] = starting_value(path)
            migrated.filled.append(option)
            migrated.lines.append(Became("", _text(options[option]), "yours to set", f"{option}: not in the files"))
    if "model.model_type" not in options and "model.hidden_size" not in migrated.filled:
        _name_the_family(migrated)


def _name_the_family(migrated: MigratedConfig) -> None:
    """Chooses the family of Hugging Face whose models are so; where there is none, says what the nearest lacks."""
    try:
        model = ModelConfig.model_validate(migrated.values().get("model", {}))
    except ValidationError:
        return  # told with all other problems
    lacking: list[str] = []
    for name, family in FAMILIES.items():
        try:
            family.check(model)
        except FamilyError as error:
            lacking.append(str(error))
            continue
        migrated.options["model.model_type"] = name
        return
    nearest = "gpt_neox" if model.normalization == "layernorm" else "llama"
    if model.position_embedding == "learned":
        nearest = "gpt2"
    migrated.options["model.model_type"] = nearest
    reason = dict(zip(FAMILIES, lacking, strict=True))[nearest]
    migrated.lines.append(Became("", "", "not here", f"no model family is so; {nearest}: {reason}"))


def _broken(migrated: MigratedConfig) -> list[str]:
    """Returns a sentence for each option with an impossible value, and for each rule that is broken."""
    values = migrated.values()
    if found := [sentence for _, sentence in secrets_among(values)]:
        return found  # other sentences repeat values
    comes_with_weights = "training.initialize_from" in migrated.options
    if comes_with_weights:  # sizes that the rules are held against are not known yet
        values["model"] = {size: starting_value(("model", size)) for size in SIZES} | values.get("model", {})
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        return [problem.sentence for problem in problems_of(error, Config)]
    dp = config.parallel.data_parallel_size
    broken = broken_rules(config, None if dp == "auto" else dp, device=None)
    return [rule for rule in broken if not (comes_with_weights and "model." in rule)]
