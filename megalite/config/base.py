"""The base class of every section (strict, frozen, documented) and the number types of their options."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Device = Literal["cpu", "cuda"]  # of a run


class Section(BaseModel):
    """A section of the config: unknown options are refused, and values never change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # validators are built by the first load, not by `import` (0.1 s)
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_section_means_defaults(cls, values: Any) -> Any:
        """Accepts YAML's null, which `monitor:` without options is, as an empty section."""
        return {} if values is None else values


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of a field whose annotation is a section or `a section | None`, else None."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        annotation = kinds[0] if len(kinds) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def items_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of the items of a field that holds sections, by name or in a list, else None."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (dict, tuple, list):
        return section_of(parts[1] if kind is dict else parts[0])
    return None


def _not_a_bool(value: Any) -> Any:
    """Makes pydantic refuse `vocab_size: true`, which it would read as the number 1."""
    return str(value).lower() if isinstance(value, bool) else value


NotBool = BeforeValidator(_not_a_bool)
"""Stands behind a number's bounds: in front of them, they would not reach the JSON schema."""

PositiveInt = Annotated[int, Field(gt=0), NotBool]
BatchCount = Annotated[int, Field(gt=0, le=1_000_000), NotBool]  # a step lists its micro-batches before the first one
RankCount = Annotated[int, Field(gt=0, le=100_000), NotBool]  # checks make lists as long before they refuse more
NonNegativeInt = Annotated[int, Field(ge=0), NotBool]
Number = Annotated[float, NotBool]
PositiveFloat = Annotated[float, Field(gt=0), NotBool]
NonNegativeFloat = Annotated[float, Field(ge=0), NotBool]
Probability = Annotated[float, Field(ge=0, lt=1), NotBool]
Fraction = Annotated[float, Field(ge=0, le=1), NotBool]
PositiveFraction = Annotated[float, Field(gt=0, le=1), NotBool]

DerivedInt = Annotated[
    int, Field(gt=0), BeforeValidator(_not_a_bool, json_schema_input_type=Annotated[int, Field(gt=0)] | None)
]
"""A positive int that may be left out or null in a file and is filled in from other options on loading."""
