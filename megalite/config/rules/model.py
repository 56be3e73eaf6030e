"""Rules about several options of one model, for training, conversion and generation alike.

In: a `ModelConfig`. Out: None, or one sentence with the reason and a value that works.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from megalite.config.model import ModelConfig, RopeScaling
from megalite.config.suggestions import multiples_near, neighbours

# rope_type -> fields that it needs, fields that it may have; as transformers' `RotaryEmbeddingConfigMixin` has it
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "original_max_position_embeddings", "attention_factor")),
}

OF_EXPERTS = (
    *("num_experts_per_tok", "norm_topk_prob", "mlp_only_layers", "scoring_func", "n_group", "topk_group"),
    "fp32_router",
    *("group_score", "routed_scaling_factor", "e_score_correction_bias", "n_shared_experts"),
)


def problem_with_model(model: ModelConfig) -> str | None:
    """Returns the sentence of the first broken rule, or None if all hold."""
    return next(problems_with_model(model), None)


def problems_with_model(model: ModelConfig) -> Iterator[str]:
    """Yields a sentence for each broken rule."""
    return chain(_heads(model), _latents(model), _layers(model), _experts(model), _norms(model), _positions(model))


def _heads(model: ModelConfig) -> Iterator[str]:
    hidden, head_dim = model.hidden_size, model.head_dim
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    if "head_dim" not in model.model_fields_set and model.kv_lora_rank is None and hidden % heads:
        yield (
            f"model.hidden_size {hidden} is not a multiple of model.num_attention_heads {heads}: use a hidden_size of "
            f"{multiples_near(hidden, 2 * heads)}, or set model.head_dim"
        )
    if model.position_embedding == "rope":
        # an odd part of a head is rounded up, as transformers does
        if head_dim % 2 and model.partial_rotary_factor == 1 and not model.qk_rope_head_dim:
            yield (
                f"model.head_dim {head_dim} is odd, but RoPE rotates pairs: use a head_dim of "
                f"{multiples_near(head_dim, 2)}, or a model.hidden_size of {multiples_near(hidden, 2 * heads)} with "
                "head_dim left out"
            )
        if head_dim and int(head_dim * model.partial_rotary_factor) == 0:
            yield (
                f"model.partial_rotary_factor {model.partial_rotary_factor:g} of model.head_dim {head_dim} is less "
                f"than one feature, so no position would be encoded: use at least {2 / head_dim:.4g}"
            )
    if heads % kv:
        near = neighbours(kv, [size for size in range(1, heads + 1) if heads % size == 0])
        yield (
            f"model.num_attention_heads {heads} is not a multiple of model.num_key_value_heads {kv}, so query "
            f"heads cannot share kv heads evenly: use {near} kv heads"
        )


LATENT_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# what latent attention is made for; its rotated features are a part of each head already
LATENT_NEEDS: dict[str, Any] = {
    **{"position_embedding": "rope", "query_key_norm": "none", "partial_rotary_factor": 1.0},
    **{"layers_without_rope": (), "rope_local_base_freq": None, "query_pre_attn_scalar": None},
}


def _latents(model: ModelConfig) -> Iterator[str]:
    if model.kv_lora_rank is None:
        for option in _set_among(model, "q_lora_rank", *LATENT_SIZES):
            yield (
                f"model.{option} is about latent attention, but model.kv_lora_rank is null: remove it, or set "
                "kv_lora_rank"
            )
        return
    option = f"model.kv_lora_rank {model.kv_lora_rank}"
    for size in LATENT_SIZES:
        if getattr(model, size) is None:
            yield f"{option} needs model.{size}: set it (DeepSeek-V3 has 128, 64 and 128 of {', '.join(LATENT_SIZES)})"
            return
    nope, rotated, value = model.qk_nope_head_dim or 0, model.qk_rope_head_dim or 0, model.v_head_dim or 0
    if model.head_dim != nope + rotated:
        yield (
            f"model.head_dim {model.head_dim} is not the {nope + rotated} of model.qk_nope_head_dim {nope} and "
            f"qk_rope_head_dim {rotated}: leave head_dim out"
        )
    elif value > model.head_dim:
        yield f"model.v_head_dim {value} is more than model.head_dim {model.head_dim}: use at most that"
    if rotated % 2:
        yield f"model.qk_rope_head_dim {rotated} is odd, but pairs are rotated: use {multiples_near(rotated, 2)}"
    if model.num_key_value_heads != model.num_attention_heads:
        yield (
            f"{option} makes keys for each of model.num_attention_heads {model.num_attention_heads}, not for "
            f"model.num_key_value_heads {model.num_key_value_heads}: leave num_key_value_heads out"
        )
    for name, wanted in LATENT_NEEDS.items():
        if (found := getattr(model, name)) != wanted:
            yield f"model.{name} {found} does not go with {option}: leave {name} out"


def _layers(model: ModelConfig) -> Iterator[str]:
    layers, types = model.num_hidden_layers, model.layer_types
    if len(types) != layers:
        yield (
            f"model.layer_types names {len(types)} layers, but model.num_hidden_layers is {layers}: name {layers}, or "
            "set layer_types to null"
        )
    if model.sliding_window is None and "sliding_attention" in types:
        yield (
            f"model.layer_types has sliding_attention (layer {types.index('sliding_attention')}), but "
            "model.sliding_window is null: set the window in tokens, or make it full_attention"
        )
    for option in ("mlp_only_layers", "layers_without_rope"):
        for layer in getattr(model, option):
            if layer >= layers:
                yield (
                    f"model.{option} names layer {layer}, but the {layers} layers are counted from 0: use numbers up "
                    f"to {layers - 1}"
                )


def _experts(model: ModelConfig) -> Iterator[str]:
    experts = model.num_experts
    if experts is None:
        for option in _set_among(model, *OF_EXPERTS):
            yield f"model.{option} is about experts, but model.num_experts is null: remove it, or set num_experts"
        return
    if model.num_experts_per_tok > experts:
        yield (
            f"model.num_experts_per_tok {model.num_experts_per_tok} is more than model.num_experts {experts}: "
            f"use at most {experts}"
        )
    yield from _groups_of_experts(model, experts)
    if not model.gated_mlp or model.mlp_bias:
        found = "mlp_bias true" if model.gated_mlp else "gated_mlp false"
        yield (
            f"model.{found} does not go with model.num_experts {experts}, whose experts are gated and have no "
            "biases: remove one of them"
        )


def _groups_of_experts(model: ModelConfig, experts: int) -> Iterator[str]:
    groups, best, size = model.n_group, model.topk_group, experts // model.n_group
    if experts % groups:
        near = neighbours(groups, [count for count in range(1, experts + 1) if experts % count == 0])
        yield f"model.num_experts {experts} are not model.n_group {groups} groups of one size: use {near} groups"
    elif best > groups:
        yield f"model.topk_group {best} is more than model.n_group {groups}: use at most {groups}"
    elif model.num_experts_per_tok > best * size:
        yield (
            f"model.num_experts_per_tok {model.num_experts_per_tok} is more than the {best * size} experts in "
            f"model.topk_group {best} of {groups} groups: use at most {best * size}, or a topk_group of "
            f"{-(-model.num_experts_per_tok // size)}"
        )
    elif groups > 1 and model.group_score == "top2_sum" and size < 2:
        yield (
            f"model.group_score top2_sum needs two experts in a group, but there are {experts} in model.n_group "
            f"{groups}: use fewer groups, or group_score max"
        )


def _norms(model: ModelConfig) -> Iterator[str]:
    if model.use_parallel_residual and model.norm_placement != "pre":
        yield (
            f"model.norm_placement {model.norm_placement} does not go with model.use_parallel_residual true, where "
            "both parts of a block read norms of its input: use norm_placement pre"
        )
    if model.query_key_norm == "full_width" and model.normalization != "rmsnorm":
        yield (
            f"model.query_key_norm full_width does not go with model.normalization {model.normalization}: use rmsnorm, "
            "or query_key_norm per_head"
        )


def _positions(model: ModelConfig) -> Iterator[str]:
    if model.position_embedding == "learned":
        rotary = ("rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "layers_without_rope")
        for option in _set_among(model, *rotary):
            yield (
                f"model.{option} is about rotary embedding, but model.position_embedding is learned: remove it, or "
                "use position_embedding rope"
            )
    if model.rope_scaling is not None:
        yield from _rope_fields(model.rope_scaling)
        yield from _rope_values(model, model.rope_scaling)


def _rope_fields(scaling: RopeScaling) -> Iterator[str]:
    needed, allowed = ROPE_FIELDS[scaling.rope_type]
    for field in type(scaling).model_fields:
        if field in needed and getattr(scaling, field) is None:
            yield (
                f"model.rope_scaling.rope_type {scaling.rope_type} needs {', '.join(needed)}: set "
                f"model.rope_scaling.{field}"
            )
        if field not in ("rope_type", *needed, *allowed) and getattr(scaling, field) is not None:
            yield (
                f"model.rope_scaling.{field} has no meaning with rope_type {scaling.rope_type}, which has "
                f"{', '.join((*needed, *allowed))}: remove it"
            )


def _rope_values(model: ModelConfig, scaling: RopeScaling) -> Iterator[str]:
    """Yields the problems of numbers. The last three have no result: an exponent dim / (dim - 2), and logarithms of the
    base and of the original length, by which the formulas divide."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and high <= low:
        yield (
            f"model.rope_scaling.high_freq_factor {high:g} must be larger than low_freq_factor {low:g}: Llama 3.1 has "
            "4 and 1"
        )
    rotated = model.rotated_features
    pairs = -(-rotated // 2)
    for field, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
        if factors is not None and len(factors) != pairs:
            yield (
                f"model.rope_scaling.{field} has {len(factors)} numbers, but {pairs} pairs of features of a head are "
                f"rotated: give {pairs}"
            )
    if scaling.rope_type == "dynamic" and rotated <= 2:
        yield "model.rope_scaling.rope_type dynamic needs more than 2 rotated features: use a larger model.head_dim"
    if scaling.rope_type == "yarn" and model.rope_theta == 1:
        yield "model.rope_theta 1 rotates all features alike, which yarn cannot scale: use one above 1"
    length = scaling.original_max_position_embeddings or model.max_position_embeddings
    if scaling.rope_type == "longrope" and length == 1:
        yield "model.rope_scaling.original_max_position_embeddings 1 is no length to scale: use one above 1"


def _set_among(model: ModelConfig, *options: str) -> Iterator[str]:
    """Yields the options that do not have their default."""
    return (option for option in options if getattr(model, option) != ModelConfig.model_fields[option].default)
