"""Turns pydantic's validation errors into `ConfigProblem`s, one sentence each, or into one line for the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megalite.config.auto import AUTO, CHOOSABLE
from megalite.config.base import items_of, section_of
from megalite.config.foreign_words import answer, answer_to_value, leaves, rows_of
from megalite.config.suggestions import OptionPath, dotted, is_slip, named_as, nearest_option, option_paths, own_names


class ConfigError(ValueError):
    """Raised for a config that cannot work; each of its sentences has a reason and a remedy.

    Its text is one line, the first sentence and the number of the others.
    """

    def __init__(self, *sentences: str) -> None:
        super().__init__(one_line(sentences))
        self.sentences = sentences


@dataclass(frozen=True)
class ConfigProblem:
    """One problem of a config."""

    path: OptionPath  # the option or section it concerns
    sentence: str  # the problem and its remedy, in one line
    meant: OptionPath = ()  # the option that an unknown name was probably meant to be; empty if none is similar


TAKERS = ("path", "dtype", "name", "mode", "enabled")  # options that are meant where their section is given a value

SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "seconds": 1, "minutes": 60, "hours": 3_600, "days": 86_400}

EXPECTATIONS = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_parsing_size": "an integer of fewer digits",
    "less_than_equal": "at most {le}",
    "path_type": "a path",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "text that matches {pattern}",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "missing": "a longer list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "dict_type": "a section with options of its own",
}
"""Types of pydantic's errors whose text speaks of Python, and the expectation in YAML's terms; `{...}` are pydantic's
values. An option that is missing is a problem of its own; here it is an item of a list."""


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[ConfigProblem]:
    """Lists all problems, unknown options first: a misspelled option is also missing under its right name.

    Values of the wrong type are one problem per option: the branches of a union become `a or b`.
    """
    unknown: list[ConfigProblem] = []
    refused: list[ConfigProblem] = []
    expected: dict[OptionPath, list[str]] = {}
    got: dict[OptionPath, Any] = {}
    missing: list[ConfigProblem] = []
    for detail in error.errors(include_url=False):
        path, kind = option_path(detail["loc"], model), detail["type"]
        if kind == "extra_forbidden":
            unknown.extend(_unknown_options(path, detail["input"], model))
        elif kind == "value_error":
            # of the section `deepspeed` all that is wrong, each at its own key
            found = getattr(detail["ctx"]["error"], "found", [((), str(detail["ctx"]["error"]))])
            refused.extend(ConfigProblem((*path, *inner), sentence) for inner, sentence in found)
        elif kind == "missing" and len(path) == len(detail["loc"]):
            missing.append(ConfigProblem(path, _missing(path, model)))
        elif kind == "model_type":
            refused.append(ConfigProblem(path, _not_a_section(path, detail["input"], model)))
        elif kind != "default_factory_not_called":
            expected.setdefault(path, []).append(expectation(detail))
            got[path] = detail["input"]
    for path in expected.keys() & CHOOSABLE:
        values = ", ".join(dict.fromkeys(expected[path])).replace(" or ", ", ")
        expected[path] = [values, AUTO] if got[path] != AUTO else [f"{values} in a list", f"{AUTO} alone"]
    wrong = [
        ConfigProblem(path, f"{dotted(path)} {must_be(path[-1], texts, got[path])}") for path, texts in expected.items()
    ]
    meant = [problem.meant for problem in unknown]
    missing = [
        problem for problem in missing if not any(problem.path == option[: len(problem.path)] for option in meant)
    ]
    return [*unknown, *refused, *wrong, *missing]


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Summarises pydantic's report in one line: the first problem in full and the number of the others."""
    return one_line(problem.sentence for problem in problems_of(error, model))


def one_line(sentences: Iterable[str]) -> str:
    """Returns the first sentence in full and the number of the others."""
    first, *others = sentences
    return f"{first} (and {len(others)} more)" if others else first


def option_path(loc: Sequence[int | str], model: type[BaseModel]) -> OptionPath:
    """Returns the option an error concerns: `loc` without list positions and pydantic's union branches."""
    path: list[str] = []
    section: type[BaseModel] | None = model
    is_name = False  # of an item, such as a source of `data.sources`
    for part in loc:
        if section is None:
            break
        if part == "[key]":  # the name itself is wrong, which stands before it
            break
        path.append(str(part))
        if is_name:
            is_name = False
            continue
        field = section.model_fields.get(str(part))
        items = items_of(field.annotation) if field else None
        section, is_name = items or (section_of(field.annotation) if field else None), items is not None
    return tuple(path)


def _unknown_options(path: OptionPath, value: Any, model: type[BaseModel]) -> list[ConfigProblem]:
    """Returns the problems of an unknown option; of another stack's section, those of everything in it."""
    inside = {(*path, *inner): given for inner, given in leaves(value)} if isinstance(value, dict) else {}
    if not is_slip(path, model) and any(
        rows_of(dotted(leaf), own_names(model)) or answer_to_value(given) for leaf, given in inside.items()
    ):
        return [ConfigProblem(leaf, *unknown_option(leaf, given, model)) for leaf, given in inside.items()]
    return [ConfigProblem(path, *unknown_option(path, value, model))]


def unknown_option(path: OptionPath, value: Any, model: type[BaseModel]) -> tuple[str, OptionPath]:
    """Returns the sentence for an unknown option, and the option that was probably meant (empty if none is similar).

    A word of another stack is answered from the table of its words, any other, and one that a letter parts from an
    option beside it, by the most similar name.
    """
    name, colon, rest = path[-1].partition(":")
    if colon and value is None:
        return f'unknown option "{dotted(path)}": YAML wants a space after a colon, {name}: {rest}', (*path[:-1], name)
    if said := answer_to_value(value):
        return f'unknown option "{dotted(path)}", and {shown(value)} is a word {said}', ()
    if not is_slip(path, model) and (found := rows_of(dotted(path), own_names(model))):
        known = named_as(path, option_paths(model))
        options = [tuple(option.split(".")) for _, row in found for option in row.options]
        options = [beside if (beside := (*path[:-1], option[-1])) in known else option for option in options]
        meant = next((option for option in options if option in known), ())
        if len({row.option for _, row in found}) == 1 and found[0][1].option:
            return f'unknown option "{dotted(path)}": did you mean "{dotted(options[0])}"?', meant
        return f'unknown option "{dotted(path)}", a word {answer(found)}', meant
    if suggestion := nearest_option(path, value, model):
        typed, meant = suggestion
        mix = f" Of a mix: data.sources={{NAME: {{path: PREFIX, {meant[-1]}: ...}}}}; one text has training.tokens"
        asked = f'did you mean "{dotted(meant)}"?' + mix * ("sources" in meant[:-2])
        return f'unknown option "{dotted(typed)}": {asked}', meant
    known = named_as(path, option_paths(model))
    while path[:-1] and not any(path[:-1] == one[: len(path) - 1] for one in known):  # the first part that is unknown
        path = path[:-1]
    names = ", ".join(section_at(path[:-1], model).model_fields)
    where = f"section {dotted(path[:-1])}" if path[:-1] else "the config"
    return f'unknown option "{dotted(path)}": {where} has {names}', ()


def section_at(path: OptionPath, model: type[BaseModel]) -> type[BaseModel]:
    """Returns the section class at a path of the config; of an item, whatever its name is."""
    names = iter(path)
    for name in names:
        annotation = model.model_fields[name].annotation
        if items := items_of(annotation):
            next(names, None)
        section = items or section_of(annotation)
        assert section is not None, f"{dotted(path)} is not a section"
        model = section
    return model


def _missing(path: OptionPath, model: type[BaseModel]) -> str:
    """Returns the sentence for a required option or section that is missing."""
    field = section_at(path[:-1], model).model_fields[path[-1]]
    section = section_of(field.annotation)
    if section is not None:
        required = [name for name, inner in section.model_fields.items() if inner.is_required()]
        return f"section {dotted(path)} is required" + (f", with {', '.join(required)}" if required else "")
    meaning = (field.description or "").split(". ")[0].rstrip(".")
    return f"{dotted(path)} is required ({meaning[:1].lower()}{meaning[1:]})"


def _not_a_section(path: OptionPath, value: Any, model: type[BaseModel]) -> str:
    """Returns the sentence for a value in the place of a section, with the option in it that takes such a value."""
    section = section_at(path, model)
    meant = f"it has {', '.join(section.model_fields)}"
    if said := answer_to_value(value):
        meant = f"a word {said}"
    for name in (name for name in TAKERS if name in section.model_fields):
        try:
            section.model_validate({name: value})
        except ValidationError as error:
            if any(detail["loc"][:1] == (name,) for detail in error.errors()):
                continue
        meant = f"did you mean {dotted((*path, name))}={value if isinstance(value, str) else shown(value)}?"
    if path == ("model",) and isinstance(value, str):
        meant = f"`megalite config init --from {value}` writes a config for a model of that name"
    return f"{dotted(path)} must be a section with options of its own, got {shown(value)}: {meant}"


def must_be(name: str, expectations: Iterable[str], value: Any) -> str:
    """Returns what the value of an option or flag must be, what it is, and how it is written if that can be told."""
    wanted = " or ".join(dict.fromkeys(expectations))
    is_list = "a list" in wanted and isinstance(value, str)
    remedy = f": write [{value}]" if is_list else _as_written(name, value)
    if said := answer_to_value(value):
        remedy = f", a word {said}"
    return f"must be {wanted}, got {shown(value)}{remedy}"


def _as_written(name: str, value: Any) -> str:
    """Returns how to write a number or a time with the letter of a unit, or numbered items of a list."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,3}(,\d{3})+", value):
        return f": write {value.replace(',', '')}"
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value)):
        return f": write {float(found[1]) / 100:g}"
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?([smhd])", value)):
        unit = SECONDS.get(name.rpartition("_")[2])
        return f": write {float(found[1]) * SECONDS[found[2]] / unit:g}, without a unit" if unit else ""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMBGT])(?:i?[bB])?", value)):
        power = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}[found[2].upper()]
        return f": write {round(float(found[1]) * 10**power):_}"
    if isinstance(value, dict) and value and all(str(name).isdigit() for name in value):
        return ": give the whole list in one value, [{...}, {...}]; its items have no names"
    return ""


def expectation(detail: ErrorDetails) -> str:
    """Returns what pydantic says that a value must be, in YAML's terms."""
    template = EXPECTATIONS.get(detail["type"])
    if template is not None:
        return template.format(**detail.get("ctx", {}))
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"]).replace("'", "")
    # "Input should be a valid integer, unable to parse string as an integer": only the expectation itself
    return detail["msg"].removeprefix("Input should be ").partition(",")[0].replace("\n", " ")


def shown(value: Any, limit: int = 60) -> str:
    """Formats a value for a message, on one line of at most `limit` characters."""
    text = repr(value)
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    return text if len(text) <= limit else text[: limit - 3] + "..."
