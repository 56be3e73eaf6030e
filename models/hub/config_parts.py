"""Parts of config.json in which options and keys do not correspond one to one, with functions to read and write them.

Families list their parts; a part is two pure functions between dicts. Here are those of blocks that differ from the
others: layers with a sliding window, rotary embedding or experts; rotary embedding itself is in rope_config.py.
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
    # config.json to options; raises FamilyError for what we would not compute exactly
    read: Callable[[Keys], dict[str, Any]]
    # a model, and the keys that an import kept, to keys; raises FamilyError if that is impossible
    write: Callable[[ModelConfig, Keys], dict[str, Any]]


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


# Layers that differ: transformers' families specify them by a list, a period, a first layer or a switch for all. We
# have lists only, so a folder may get a list in place of a period; transformers reads both in the same way.

WINDOW_OPTIONS = ("sliding_window", "layer_types")
FULL, SLIDING = "full_attention", "sliding_attention"


def one_window(switch: str | None = None) -> ConfigPart:
    """Returns a part with a window in every layer or in none. switch: a key that enables the window."""

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

    return ConfigPart(WINDOW_OPTIONS, ("sliding_window", *([switch] if switch else [])), read, write)


def typed_layers(full_every: int | None = None, period_key: str | None = None) -> ConfigPart:
    """Returns a part with a list of `layer_types`, by default full attention in every `full_every`th layer.

    period_key: a key that overrides `full_every`. full_every None: all layers are sliding. transformers builds the mask
    of sliding layers even if there are none, so there must be a window.
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
    return ConfigPart(WINDOW_OPTIONS, keys, read, write)


def switched_window() -> ConfigPart:
    """Returns a part with `layer_types` for a model whose window needs `use_sliding_window`. Without a list, layers
    from `max_window_layers` on are sliding."""

    def read(keys: Keys) -> dict[str, Any]:
        window = keys.get("sliding_window") if keys.get("use_sliding_window") else None
        is_full = [window is None or layer < keys["max_window_layers"] for layer in layers_of(keys)]
        return {"sliding_window": window, "layer_types": types_of(keys, window, is_full)}

    def write(model: ModelConfig, kept: Keys) -> dict[str, Any]:
        return {**write_types(model, kept), "use_sliding_window": model.sliding_window is not None}

    return ConfigPart(
        WINDOW_OPTIONS, ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), read, write
    )


def types_of(keys: Keys, window: int | None, is_full: list[bool]) -> list[str]:
    """Returns the `layer_types` of a config.json, by default those given by `is_full` for each layer."""
    types = keys.get("layer_types") or [FULL if full else SLIDING for full in is_full]
    if len(types) != len(is_full):
        raise FamilyError(f"config.json has {len(types)} layer_types for {len(is_full)} layers")
    if window is None and SLIDING in types:
        raise FamilyError("config.json has layer_types with sliding_attention, but no sliding_window in use")
    return list(types)


def write_types(model: ModelConfig, _: Keys) -> dict[str, Any]:
    """Writes the window and its layers as a list."""
    return {"sliding_window": model.sliding_window, "layer_types": list(model.layer_types)}


def layers_of(keys: Keys) -> range:
    """Returns the layers of a config.json, counted from 0."""
    return range(keys["num_hidden_layers"])


EXPERT_OPTIONS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers")
LATENT_OPTIONS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NO_LATENTS = absent(LATENT_OPTIONS, "kv_lora_rank", None)
NO_WINDOW = absent(WINDOW_OPTIONS, "sliding_window", None)
NO_EXPERTS = absent(EXPERT_OPTIONS, "num_experts", None)
