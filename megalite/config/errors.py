"""One sentence for everything that can be wrong with a config.

In: an exception of pydantic. Out: `Problem`s, each with the option it is about, or one line for a person.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megalite.config.auto import AUTO, CHOOSABLE
from megalite.config.base import Section
from megalite.config.nearest import OptionPath, dotted, nearest_option


class ConfigError(ValueError):
    """The user's config cannot work; the message is one sentence that says why and what would."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config."""

    path: OptionPath
    """The option (or section) it is about."""

    sentence: str
    """What is wrong and what would work, in one line."""


EXPECTATIONS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "path_type": "a path",
    "none_required": "null",
    "literal_error": "{expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "dict_type": "a section with options of its own",
    "model_type": "a section with options of its own",
}
"""Pydantic's error types as what we expected instead; `{...}` are its own numbers."""


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Everything wrong, unknown options first (a misspelled option is also missing under its right name)."""
    details = error.errors(include_url=False)
    unknown = [_unknown(detail, model) for detail in details if detail["type"] == "extra_forbidden"]
    meant = {option for _, option in unknown}
    missing = [
        Problem(path := option_path(detail["loc"], model), _missing(path, model))
        for detail in details
        if detail["type"] == "missing" and not _is_item(detail["loc"], model)
    ]
    return (
        [problem for problem, _ in unknown]
        + _wrong_values(details, model)
        + [problem for problem in missing if not any(problem.path == option[: len(problem.path)] for option in meant)]
    )


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Pydantic's report as one line: the first problem in full, then how many more."""
    return one_line(problem.sentence for problem in problems_of(error, model))


def one_line(sentences: Iterable[str]) -> str:
    """The first sentence in full, and the number of the others."""
    first, *others = sentences
    return f"{first} (and {len(others)} more)" if others else first


def option_path(loc: Sequence[int | str], model: type[BaseModel]) -> OptionPath:
    """The option an error is about: `loc` without list positions and without pydantic's union branches."""
    path: list[str] = []
    section: type[BaseModel] | None = model
    for part in loc:
        if section is None:
            break
        path.append(str(part))
        field = section.model_fields.get(str(part))
        section = section_of(field.annotation) if field else None
    return tuple(path)


def section_of(annotation: Any) -> type[Section] | None:
    """The section class an annotation stands for, if it is one."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _is_item(loc: Sequence[int | str], model: type[BaseModel]) -> bool:
    """Whether `loc` points inside a list, not at an option."""
    return len(option_path(loc, model)) < len(loc)


def _unknown(detail: ErrorDetails, model: type[BaseModel]) -> tuple[Problem, OptionPath]:
    """The problem of an unknown option, and the option that was probably meant (empty when none is near)."""
    path = option_path(detail["loc"], model)
    value = detail["input"]
    suggestion = nearest_option(path, value, model)
    if suggestion is not None:
        typed, meant = suggestion
        return Problem(path, f'unknown option "{dotted(typed)}": did you mean "{dotted(meant)}"?'), meant
    section = section_at(path[:-1], model)
    names = ", ".join(section.model_fields)
    where = f"section {dotted(path[:-1])}" if path[:-1] else "the config"
    return Problem(path, f'unknown option "{dotted(path)}": {where} has {names}'), ()


def section_at(path: OptionPath, model: type[BaseModel]) -> type[BaseModel]:
    """The section class at a path of the config."""
    for name in path:
        section = section_of(model.model_fields[name].annotation)
        assert section is not None, f"{dotted(path)} is not a section"
        model = section
    return model


def _missing(path: OptionPath, model: type[BaseModel]) -> str:
    field = section_at(path[:-1], model).model_fields[path[-1]]
    section = section_of(field.annotation)
    if section is not None:
        required = [name for name, inner in section.model_fields.items() if inner.is_required()]
        return f"section {dotted(path)} is required, with {', '.join(required)}"
    meaning = (field.description or "").split(". ")[0].rstrip(".")
    return f"{dotted(path)} is required ({meaning[:1].lower()}{meaning[1:]})"


def _wrong_values(details: Iterable[ErrorDetails], model: type[BaseModel]) -> list[Problem]:
    """Values of the wrong kind, one problem per option: the branches of a union become `a or b`."""
    expected: dict[OptionPath, list[str]] = {}
    got: dict[OptionPath, Any] = {}
    own: list[Problem] = []
    for detail in details:
        path = option_path(detail["loc"], model)
        kind = detail["type"]
        if kind == "value_error":
            own.append(Problem(path, str(detail["ctx"]["error"])))
        elif kind == "missing" and _is_item(detail["loc"], model):
            expected.setdefault(path, []).append("a longer list")
            got[path] = detail["input"]
        elif kind not in ("extra_forbidden", "missing", "default_factory_not_called"):
            expected.setdefault(path, []).append(_expectation(detail))
            got[path] = detail["input"]
    for path in expected.keys() & CHOOSABLE:
        expected[path] = [*(text.replace(" or ", ", ") for text in expected[path]), AUTO]
    wrong = [
        Problem(path, f"{dotted(path)} must be {' or '.join(dict.fromkeys(texts))}, got {shown(got[path])}")
        for path, texts in expected.items()
    ]
    return own + wrong


def _expectation(detail: ErrorDetails) -> str:
    template = EXPECTATIONS.get(detail["type"])
    if template is None:
        return detail["msg"].replace("\n", " ").removeprefix("Input should be ")
    return template.format(**detail.get("ctx", {})).replace("'", "")


def shown(value: Any, limit: int = 60) -> str:
    """A value for a message, on one line."""
    text = repr(value)
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    return text if len(text) <= limit else text[: limit - 3] + "..."
