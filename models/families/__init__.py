"""The model families that Hugging Face and we both compute, by transformers' `model_type`.

To add one: a file with a `Family` beside this one, and its name in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from models.families.base import Family, FamilyError
from models.families.llama import LLAMA
from models.families.starcoder2 import STARCODER2

FAMILIES = {known.model_type: known for known in (LLAMA, STARCODER2)}

__all__ = ["FAMILIES", "Family", "FamilyError", "family", "hf_config", "model_config"]


def family(model_type: object) -> Family:
    """The family of a `model_type`, as a config or a config.json names it."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FamilyError(f"model_type {model_type!r} is not a family known here, which are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def model_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` for a config.json."""
    return family(hf_config.get("model_type")).options(hf_config)


def hf_config(model: ModelConfig, dtype: str, carried: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json for `model` with weights in `dtype`; `carried` is what `Family.carried` kept on import."""
    return family(model.model_type).hf_config(model, dtype, carried or {})
