"""Shrinks the model of a user's config: fewer layers, smaller widths, and every option still in effect.

A window, a rope scaling or a cap that a short sequence never reaches would go untested, so they shrink too.
In: a `ModelConfig`, the layouts, the sequence length. Out: a `ModelConfig`, and a phrase for each change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from launch.parity.layout import ParityLayout
from megalite.config import ModelConfig
from megalite.config.model import RopeScaling

MOST_LAYERS, MOST_VOCABULARY = 5, 2048
MOST_WIDTH, LEAST_WIDTH, MOST_HEAD_DIM = 256, 32, 32
MOST_EXPERTS = 4  # with half the width, or they would dominate the work
PRIME_VOCABULARY = 2039  # a reduced vocabulary is prime, so that ranks have to pad it
WINDOWS = 8  # per sequence, at least: most packed documents are then longer than the window
HIGHEST_CAP = 5.0  # random scores and logits are about 1, on which a cap of 50 has no effect


def small_model(
    model: ModelConfig, layouts: Sequence[ParityLayout], sequence_length: int, changes: list[str]
) -> ModelConfig:
    """Returns a small `model` for sequences of that length, which `layouts` cut as they cut the large one."""
    small = model
    for part in (
        _fewer_layers(model, max(MOST_LAYERS, *(layout.pieces for layout in layouts))),
        _smaller_widths(model, {layout.tp for layout in layouts}),
        _fewer_experts(model, math.lcm(*(layout.ep for layout in layouts))),
        _within_reach(model, sequence_length),
        {"vocab_size": model.vocab_size if model.vocab_size <= MOST_VOCABULARY else PRIME_VOCABULARY},
    ):
        small = small.model_copy(update=part)
    small = small.model_copy(update=_shorter_rope(small, model, sequence_length))
    # options that are numbers; lists follow from them
    names = [name for name in type(model).model_fields if model.num_experts or name != "moe_intermediate_size"]
    pairs = [(name, getattr(model, name), getattr(small, name)) for name in names]
    if model.rope_scaling is not None and small.rope_scaling is not None:
        name = "original_max_position_embeddings"
        pairs.append((f"rope_scaling.{name}", getattr(model.rope_scaling, name), getattr(small.rope_scaling, name)))
    changes += [
        f"model.{name} {before} -> {after}"
        for name, before, after in pairs
        if before != after and isinstance(before, int | float)
    ]
    return small


def _fewer_layers(model: ModelConfig, most: int) -> dict[str, Any]:
    """Keeps the first layers and the first one of every kind."""
    kinds: dict[tuple[bool, ...], int] = {}
    for layer in range(model.num_hidden_layers):
        kind = (model.has_window(layer), model.has_experts(layer), model.rotary_dim(layer) > 0)
        kinds.setdefault(kind, layer)
    kept = set(kinds.values())
    others = [layer for layer in range(model.num_hidden_layers) if layer not in kept]
    kept.update(others[: max(0, most - len(kept))])
    places = {layer: place for place, layer in enumerate(sorted(kept))}
    return {
        "num_hidden_layers": len(places),
        "layer_types": tuple(model.layer_types[layer] for layer in places),
        "mlp_only_layers": tuple(places[layer] for layer in model.mlp_only_layers if layer in places),
        "layers_without_rope": tuple(places[layer] for layer in model.layers_without_rope if layer in places),
    }


def _smaller_widths(model: ModelConfig, tensor_parallel_sizes: set[int]) -> dict[str, Any]:
    width, most = model.num_attention_heads * model.head_dim, MOST_WIDTH // 2 if model.num_experts else MOST_WIDTH
    if max(width, model.hidden_size) <= most:
        return {}
    group = model.num_attention_heads // model.num_key_value_heads
    kv_heads = _fewer_kv_heads(model, tensor_parallel_sizes)
    heads = group * kv_heads
    head_dim = max(4, min(model.head_dim, MOST_HEAD_DIM, most // heads) // 2 * 2)
    # rotary embedding rotates pairs of features, at least one
    while (rotated := int(head_dim * model.partial_rotary_factor)) == 0 or rotated % 2:
        head_dim += 2
    hidden = 2 * round(model.hidden_size * heads * head_dim / width / 2)
    hidden = min(model.hidden_size, most, max(LEAST_WIDTH, hidden))
    small: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
    }
    for feed_forward in ("intermediate_size", "moe_intermediate_size"):
        small[feed_forward] = max(8, round(getattr(model, feed_forward) * hidden / model.hidden_size))
    if model.kv_lora_rank is not None:
        small |= _smaller_latents(model, head_dim / model.head_dim, hidden / model.hidden_size)
    if model.query_pre_attn_scalar is not None:
        small["query_pre_attn_scalar"] = model.query_pre_attn_scalar * head_dim / model.head_dim
    return small


def _smaller_latents(model: ModelConfig, of_heads: float, of_hidden: float) -> dict[str, Any]:
    """Shrinks the parts of heads by one factor and latents by the other, to even sizes."""
    factors = {"qk_nope_head_dim": of_heads, "qk_rope_head_dim": of_heads, "v_head_dim": of_heads}
    factors |= {"kv_lora_rank": of_hidden, "q_lora_rank": of_hidden}
    sizes = {name: (getattr(model, name), factor) for name, factor in factors.items()}
    small = {name: max(2, round(size * factor / 2) * 2) for name, (size, factor) in sizes.items() if size is not None}
    return small | {"head_dim": small["qk_nope_head_dim"] + small["qk_rope_head_dim"]}


def _fewer_kv_heads(model: ModelConfig, tensor_parallel_sizes: set[int]) -> int:
    """Returns the fewest heads that every tensor-parallel size divides, or shares, as it does the model's own."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    group = heads // kv_heads
    for fewer in range(min(2, kv_heads), kv_heads):
        alike = (
            (heads % tp == 0) == (group * fewer % tp == 0) and (kv_heads % tp == 0) == (fewer % tp == 0)
            for tp in tensor_parallel_sizes
        )
        if all(alike):
            return fewer
    return kv_heads


def _fewer_experts(model: ModelConfig, ranks: int) -> dict[str, Any]:
    """Keeps the fraction of experts per token, but at least two if there were two, whose weights are then learned; and
    as many experts for each of the expert-parallel `ranks`."""
    fewer = -(-MOST_EXPERTS // ranks) * ranks
    if model.num_experts is None or model.num_experts <= fewer:
        return {}
    part = round(model.num_experts_per_tok * fewer / model.num_experts)
    small = {"num_experts": fewer, "num_experts_per_tok": max(min(2, model.num_experts_per_tok), part)}
    if model.n_group > 1:  # two, and one of them is chosen if that is possible
        small |= {"n_group": 1, "topk_group": 1}
        if fewer % 2 == 0:
            small |= {"n_group": 2, "topk_group": -(-small["num_experts_per_tok"] * 2 // fewer)}
    return small


def _within_reach(model: ModelConfig, sequence_length: int) -> dict[str, Any]:
    """Shrinks windows and caps so that a short random sequence reaches them."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    reached: dict[str, Any] = {cap: min(HIGHEST_CAP, getattr(model, cap)) for cap in caps if getattr(model, cap)}
    if model.sliding_window is not None:
        reached["sliding_window"] = min(model.sliding_window, max(2, sequence_length // WINDOWS))
    if model.position_embedding == "learned":  # with some positions that are never looked up
        reached["max_position_embeddings"] = min(model.max_position_embeddings, 2 * sequence_length)
    return reached


def _shorter_rope(small: ModelConfig, model: ModelConfig, sequence_length: int) -> dict[str, Any]:
    """Shrinks the original length below that of sequences, and keeps as many factors as heads have pairs."""
    scaling = model.rope_scaling
    if scaling is None:
        return {}
    changed: dict[str, Any] = {}
    lengths: dict[str, Any] = {}
    if (original := scaling.original_max_position_embeddings) is not None:
        shorter = min(original, max(1, sequence_length // 2))
        changed["original_max_position_embeddings"] = shorter
        longest = round(model.max_position_embeddings * shorter / original)
        lengths["max_position_embeddings"] = min(model.max_position_embeddings, max(sequence_length, longest))
    pairs = small.head_dim * small.partial_rotary_factor // 2
    for name in ("short_factor", "long_factor"):
        if (factors := getattr(scaling, name)) is not None and small.head_dim != model.head_dim:
            changed[name] = tuple(factors[int(pair * len(factors) // pairs)] for pair in range(int(pairs)))
    return lengths | {"rope_scaling": RopeScaling.model_validate(scaling.model_dump() | changed)}
