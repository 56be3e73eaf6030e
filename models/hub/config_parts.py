"""Parts of config.json in which options and keys do not correspond one to one, with functions to read and write them.

Families list their parts (rope_config.py, layer_kinds.py); a part is two pure functions between dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig

Keys = Mapping[str, Any]
"""The keys of a config.json."""


class FamilyError(ValueError):
    """Raised for a model that cannot be converted: names the option or key in one sentence, and a remedy."""


@dataclass(frozen=True)
class ConfigPart:
    """Options of `ModelConfig` that are expressed by several keys, or by keys with another meaning."""

    options: tuple[str, ...]
    keys: tuple[str, ...]

    read: Callable[[Keys], dict[str, Any]]
    """Converts config.json to options. Raises FamilyError for what we would not compute exactly."""

    write: Callable[[ModelConfig, Keys], dict[str, Any]]
    """Converts a model, and the keys that an import kept, to keys. Raises FamilyError if that is impossible."""


def refuse_unless(model: ModelConfig, option: str, wanted: Any) -> None:
    """Raises FamilyError if an option does not have the only value of the model's family."""
    if getattr(model, option) != wanted:
        raise FamilyError(
            f"model.{option} {shown(getattr(model, option))} is no {model.model_type} model, "
            f"whose {option} is {shown(wanted)}: change it, or model.model_type"
        )


def absent(options: tuple[str, ...], option: str, value: Any) -> ConfigPart:
    """Returns a part without keys for options that a family does not have: `option` must have `value`."""

    def write(model: ModelConfig, _: Keys) -> dict[str, Any]:
        refuse_unless(model, option, value)
        return {}

    return ConfigPart(options, (), lambda _: {}, write)


def shown(value: Any) -> str:
    """Formats a value as in YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(str, value))}]"
    return str(value)
