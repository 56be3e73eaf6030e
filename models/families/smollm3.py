"""The family SmolLM3: Llama without rotary embedding in every fourth layer."""

from typing import Any

from megalite.config import ModelConfig
from models.hub.config_parts import WINDOW_OPTIONS, ConfigPart, FamilyError, Keys, layers_of, types_of, write_types
from models.hub.family import Family
from models.hub.rope_config import rope


def _read_layers(keys: Keys) -> dict[str, Any]:
    layers, rotates = layers_of(keys), keys.get("no_rope_layers")
    if rotates is None:
        rotates = [(layer + 1) % keys["no_rope_layer_interval"] != 0 for layer in layers]
    if len(rotates) != len(layers):
        raise FamilyError(f"config.json has {len(rotates)} no_rope_layers for {len(layers)} layers")
    window = keys.get("sliding_window") if keys.get("use_sliding_window") else None
    return {
        "layers_without_rope": [layer for layer in layers if not rotates[layer]],
        "sliding_window": window,
        "layer_types": types_of(keys, window, [window is None or bool(rotated) for rotated in rotates]),
    }


def _write_layers(model: ModelConfig, kept: Keys) -> dict[str, Any]:
    return {
        **write_types(model, kept),
        "use_sliding_window": model.sliding_window is not None,
        "no_rope_layers": [int(layer not in model.layers_without_rope) for layer in range(model.num_hidden_layers)],
    }


LAYERS = ConfigPart(
    (*WINDOW_OPTIONS, "layers_without_rope"),
    ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types"),
    _read_layers,
    _write_layers,
)
"""`no_rope_layers` is 1 for layers with rotary embedding; windows, if any, are in the layers without it."""

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys={"attention_bias": "attention_bias", "attention_output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    parts=(LAYERS, rope(theta=2e6)),
    kept=("no_rope_layer_interval", "max_window_layers"),
)
