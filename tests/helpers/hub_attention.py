"""Attention layers of transformers beside our options for them: the oracle of ours, with odd sizes and loud weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, LayerSpec, Recompute, make_layer
from models.attention import Attention

HIDDEN, HEADS = 44, 4
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 14}
SMALL = {"vocab_size": 13, "intermediate_size": 8, "max_position_embeddings": 32}
SPREAD = 0.3  # of the weights: scores of several units, where caps and scales matter
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.0, 4.0],
    "original_max_position_embeddings": 8,
}


@dataclass(frozen=True)
class Pair:
    """A model type with switches of its own, and the same thing in our words (the sizes are common)."""

    name: str
    model_type: str
    switches: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: dict(SIZES))

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.model_validate({**SMALL, **self.sizes, "num_hidden_layers": 2, **self.options})

    @cached_property
    def theirs(self) -> Oracle:
        torch.manual_seed(3)
        values = {**SMALL, **self.sizes, "num_hidden_layers": 2, "pad_token_id": 0, **self.switches}
        config = transformers.AutoConfig.for_model(self.model_type, **values)
        hub = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in hub.parameters():
                parameter.normal_(0.8 if parameter.ndim == 1 else 0.0, SPREAD)
        return Oracle(hub)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Oracle:
    hub: Any

    def attention(self, layer: int) -> nn.Module:
        block = (self.hub.layers if hasattr(self.hub, "layers") else self.hub.h)[layer]
        return next(getattr(block, name) for name in ("self_attn", "attention", "attn") if hasattr(block, name))

    def __call__(self, layer: int, hidden: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """`[batch, seq, hidden]` -> the same, by block `layer`; positions `[batch, seq]`."""
        config, module = self.hub.config, self.attention(layer)
        window = getattr(config, "sliding_window", None)  # where layer_types say nothing, all have it
        default = "full_attention" if window is None else "sliding_attention"
        kind = (getattr(config, "layer_types", None) or [default] * 2)[layer]
        make_mask = create_causal_mask if kind == "full_attention" else create_sliding_window_causal_mask
        mask = make_mask(config, hidden, None, cache, positions, layer_idx=layer)
        rotary = getattr(self.hub, "rotary_emb", None)
        if rotary is not None:
            angles = rotary(hidden, positions, *([kind] if config.model_type == "gemma3_text" else []))
            return module(hidden, position_embeddings=angles, attention_mask=mask, past_key_values=cache)[0]
        return module(hidden, attention_mask=mask, past_key_values=cache)[0]

    def weights(self, layer: int) -> dict[str, Tensor]:
        return self._canonical({name: p.detach() for name, p in self.attention(layer).named_parameters()})

    def gradients(self, layer: int) -> dict[str, Tensor]:
        return self._canonical({name: p.grad for name, p in self.attention(layer).named_parameters()})  # type: ignore[misc]

    def _canonical(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Under our names: q, k and v that are one tensor are cut."""
        ours: dict[str, Tensor] = {}
        for name, value in theirs.items():
            module, leaf = name.rsplit(".", 1)
            if module in ("qkv_proj", "query_key_value", "c_attn"):
                for part, rows in zip("qkv", self._parts(module, value), strict=True):
                    ours[f"{part}_proj.{leaf}"] = rows
            else:
                module = {"dense": "o_proj", "c_proj": "o_proj"}.get(module, module)
                ours[f"{module}.{leaf}"] = value.t() if name == "c_proj.weight" else value
        return ours

    def _parts(self, module: str, value: Tensor) -> tuple[Tensor, ...]:
        if module == "c_attn":  # [in, out]
            return (value.t() if value.ndim == 2 else value).chunk(3)
        if module == "query_key_value":  # q, k, v of each head in turn
            return tuple(x.flatten(0, 1) for x in value.unflatten(0, (HEADS, 3, -1)).unbind(1))
        config = self.hub.config
        head_dim = config.hidden_size // config.num_attention_heads
        kv = config.num_key_value_heads * head_dim
        return value.split((config.num_attention_heads * head_dim, kv, kv))


def built(
    model: ModelConfig,
    layer: int,
    weight: Callable[[str, tuple[int, ...]], Tensor],
    tp: TensorParallel = TensorParallel(),  # noqa: B008  # frozen
    recompute: Recompute = "none",
    dtype: torch.dtype = torch.float32,
) -> Attention:
    """Our layer with this rank's part of global tensors, which `weight` gives by name and shape."""
    spec = LayerSpec("layer", lambda tp: Attention(model, layer, tp, recompute), cost=0.0)
    attention = make_layer(spec, tp, seed=0, initializer_range=0.02).to(dtype).eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                whole = weight(piece.name.removeprefix("layer."), piece.shape)
                parameter[piece.target] = whole[piece.source].to(dtype)
    assert isinstance(attention, Attention)
    return attention


def attend(attention: Attention, hidden: Tensor, positions: Tensor | None) -> Tensor:
    """Our layer's output, with inputs of its own."""
    output: Tensor = attention(hidden, attention.shared_inputs(BlockInput(hidden, positions)), None)
    return output


def with_weights_of(oracle: Oracle, model: ModelConfig, layer: int) -> Attention:
    """Our layer with every weight of theirs."""
    weights = oracle.weights(layer)
    taken = []

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        taken.append(name)
        assert weights[name].shape == shape, name
        return weights[name]

    attention = built(model, layer, weight)
    assert sorted(taken) == sorted(weights)
    return attention


def pieces_of_gradients(attention: nn.Module) -> list[tuple[str, tuple[slice, ...], Tensor]]:
    """Name, place in the global tensor and values of every gradient that this rank holds."""
    return [
        (piece.name.removeprefix("layer."), piece.source, parameter.grad[piece.target])  # type: ignore[index]
        for parameter in attention.parameters()
        for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
    ]


EQUAL_HEADS = {"hidden_size": 48, "num_attention_heads": 4}
NOT_GROUPED = {**EQUAL_HEADS, "num_key_value_heads": 4}
PAIRS = [
    Pair(
        "llama",
        "llama",
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    ),
    Pair("llama-biases", "llama", {"attention_bias": True}, {"attention_bias": True}),
    Pair(
        "qwen2",
        "qwen2",
        {},
        {"attention_bias": True, "attention_output_bias": False},
        {**EQUAL_HEADS, "num_key_value_heads": 2},
    ),
    Pair("qwen3", "qwen3", {}, {"query_key_norm": "per_head"}),
    Pair("mistral", "mistral", {"sliding_window": 5}, {"sliding_window": 5}),
    Pair(
        "gemma2",
        "gemma2",
        {**WINDOWS, "attn_logit_softcapping": 2.5, "query_pre_attn_scalar": 10},
        {**WINDOWS, "attn_logit_softcapping": 2.5, "query_pre_attn_scalar": 10.0},
    ),
    Pair(
        "gemma3",
        "gemma3_text",
        {
            **WINDOWS,
            "query_pre_attn_scalar": 10,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        {
            **WINDOWS,
            "query_pre_attn_scalar": 10.0,
            "query_key_norm": "per_head",
            "normalization": "zero_centered_rmsnorm",
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Pair(
        "olmo2",
        "olmo2",
        {},
        {"query_key_norm": "full_width", "rms_norm_eps": 1e-5},
        {**EQUAL_HEADS, "num_key_value_heads": 2},
    ),
    Pair(
        "smollm3",
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": False},
        {"layers_without_rope": (0,), "rope_theta": 2e6},
        {**EQUAL_HEADS, "num_key_value_heads": 2},
    ),
    Pair(
        "phi3",
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5, "rope_theta": 1e4},
            "original_max_position_embeddings": 8,
            "sliding_window": 7,
        },
        {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "sliding_window": 7},
        {**EQUAL_HEADS, "num_key_value_heads": 2},
    ),
    Pair(
        "gpt-neox",
        "gpt_neox",
        {"rotary_pct": 0.25, "num_key_value_heads": None},
        {"attention_bias": True, "partial_rotary_factor": 0.25},
        NOT_GROUPED,
    ),
    Pair(
        "gpt2",
        "gpt2",
        {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64},
        {"attention_bias": True, "position_embedding": "learned"},
        NOT_GROUPED,
    ),
]
