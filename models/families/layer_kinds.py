"""Which blocks of a model differ from the others: layers with a sliding window, with rotary embedding, with experts.

transformers' families tell it by a list, a period, a first layer or a switch for all of them. We have lists only, so a
folder may get a list where it had a period; transformers reads both alike.
"""

from __future__ import annotations

from typing import Any

from megalite.config import ModelConfig
from models.families.part import FamilyError, Keys, Part, refuse_unless

WINDOW_OPTIONS = ("sliding_window", "layer_types")
FULL, SLIDING = "full_attention", "sliding_attention"


def one_window(switch: str | None = None) -> Part:
    """A window in every layer or in none. switch: the key without which `sliding_window` means nothing."""

    def read(keys: Keys) -> dict[str, Any]:
        return {"sliding_window": keys.get("sliding_window") if switch is None or keys.get(switch) else None}

    def write(model: ModelConfig, _: Keys) -> dict[str, Any]:
        kind = FULL if model.sliding_window is None else SLIDING
        if any(found != kind for found in model.layer_types):
            raise FamilyError(
                f"model.layer_types are not all {kind}, but in a {model.model_type} model every layer has "
                "sliding_window, or none has: leave layer_types out"
            )
        written: dict[str, Any] = {"sliding_window": model.sliding_window}
        return written if switch is None else {**written, switch: model.sliding_window is not None}

    return Part(WINDOW_OPTIONS, ("sliding_window", *([switch] if switch else [])), read, write)


def typed_layers(full_every: int | None = None, period_key: str | None = None) -> Part:
    """A list of `layer_types`; where config.json has none, every `full_every`th layer is full, or as `period_key` says.

    full_every None: all are sliding. transformers builds the sliding layers' mask even where there are none, so there
    must be a window.
    """

    def read(keys: Keys) -> dict[str, Any]:
        period = keys.get(period_key or "", full_every)
        is_full = [full_every is not None and (layer + 1) % period == 0 for layer in layers_of(keys)]
        if (window := keys.get("sliding_window")) is None:
            raise FamilyError("config.json has no sliding_window, without which transformers does not run such a model")
        return {"sliding_window": window, "layer_types": types_of(keys, window, is_full)}

    def write(model: ModelConfig, kept: Keys) -> dict[str, Any]:
        if model.sliding_window is None:
            raise FamilyError(
                f"model.sliding_window null is no {model.model_type} model: set it, and to layer_types what has it"
            )
        return write_types(model, kept)

    keys = ("sliding_window", "layer_types", *([period_key] if period_key else []))
    return Part(WINDOW_OPTIONS, keys, read, write)


def switched_window() -> Part:
    """`layer_types` in a model whose window needs `use_sliding_window`; where config.json has no list, layers from
    `max_window_layers` on are sliding."""

    def read(keys: Keys) -> dict[str, Any]:
        window = keys.get("sliding_window") if keys.get("use_sliding_window") else None
        is_full = [window is None or layer < keys["max_window_layers"] for layer in layers_of(keys)]
        return {"sliding_window": window, "layer_types": types_of(keys, window, is_full)}

    def write(model: ModelConfig, kept: Keys) -> dict[str, Any]:
        return {**write_types(model, kept), "use_sliding_window": model.sliding_window is not None}

    return Part(
        WINDOW_OPTIONS, ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write
    )


def types_of(keys: Keys, window: int | None, is_full: list[bool]) -> list[str]:
    """The `layer_types` of a config.json; where it has none, what `is_full` says of each layer."""
    types = keys.get("layer_types") or [FULL if full else SLIDING for full in is_full]
    if len(types) != len(is_full):
        raise FamilyError(f"config.json has {len(types)} layer_types for {len(is_full)} layers")
    if window is None and SLIDING in types:
        raise FamilyError("config.json has layer_types with sliding_attention, but no sliding_window in use")
    return list(types)


def write_types(model: ModelConfig, _: Keys) -> dict[str, Any]:
    """The window and its layers as a list."""
    return {"sliding_window": model.sliding_window, "layer_types": list(model.layer_types)}


def layers_of(keys: Keys) -> range:
    """The layers of a config.json, counted from 0."""
    return range(keys["num_hidden_layers"])


def _no_window(model: ModelConfig, _: Keys) -> dict[str, Any]:
    refuse_unless(model, "sliding_window", None)
    return {}


def _no_experts(model: ModelConfig, _: Keys) -> dict[str, Any]:
    refuse_unless(model, "num_experts", None)
    return {}


NO_WINDOW = Part(WINDOW_OPTIONS, (), lambda _: {}, _no_window)
NO_EXPERTS = Part(
    ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"),
    (),
    lambda _: {},
    _no_experts,
)
