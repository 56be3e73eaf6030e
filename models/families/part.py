"""A part of config.json that is more than one key for one option: how it is read and how it is written.

Families name the parts they have (rope.py, layer_kinds.py); a part is two pure functions between dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig

Keys = Mapping[str, Any]
"""Of a config.json."""


class FamilyError(ValueError):
    """One sentence: which option or key of a model stands between us and Hugging Face, and what would work."""


@dataclass(frozen=True)
class Part:
    """Options of `ModelConfig` that are told by several keys, or by keys that mean something else."""

    options: tuple[str, ...]
    keys: tuple[str, ...]

    read: Callable[[Keys], dict[str, Any]]
    """config.json -> options. FamilyError where it is not computed exactly."""

    write: Callable[[ModelConfig, Keys], dict[str, Any]]
    """The model and what an import kept -> keys. FamilyError where transformers cannot be told so."""


def refuse_unless(model: ModelConfig, option: str, wanted: Any) -> None:
    """FamilyError where an option is not the one value that the model's family has."""
    if getattr(model, option) != wanted:
        raise FamilyError(
            f"model.{option} {shown(getattr(model, option))} is no {model.model_type} model, "
            f"whose {option} is {shown(wanted)}: change it, or model.model_type"
        )


def shown(value: Any) -> str:
    """As YAML spells it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(str, value))}]"
    return str(value)
