"""The base class of every section (strict, frozen, documented) and the number types of their options."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


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


def _not_a_bool(value: Any) -> Any:
    """Makes pydantic refuse `vocab_size: true`, which it would read as the number 1."""
    return str(value).lower() if isinstance(value, bool) else value


NotBool = BeforeValidator(_not_a_bool)

PositiveInt = Annotated[int, NotBool, Field(gt=0)]
NonNegativeInt = Annotated[int, NotBool, Field(ge=0)]
PositiveFloat = Annotated[float, NotBool, Field(gt=0)]
NonNegativeFloat = Annotated[float, NotBool, Field(ge=0)]
Probability = Annotated[float, NotBool, Field(ge=0, lt=1)]
Fraction = Annotated[float, NotBool, Field(ge=0, le=1)]

DerivedInt = Annotated[int, BeforeValidator(_not_a_bool, json_schema_input_type=int | None), Field(gt=0)]
"""A positive int that may be left out or null in a file and is filled in from other options on loading."""
