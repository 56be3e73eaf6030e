"""Rules about several options of one model, for training, conversion and generation alike.

In: a `ModelConfig`. Out: None, or one sentence with the reason and a value that works.
"""

from __future__ import annotations

from collections.abc import Callable

from megalite.config.model import ModelConfig
from megalite.config.suggestions import multiples_near, neighbours

# rope_type -> fields that it needs, fields that it may have; as transformers' `RotaryEmbeddingConfigMixin` has it
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "original_max_position_embeddings", "attention_factor")),
}


def problem_with_model(model: ModelConfig) -> str | None:
    """Returns the sentence of the first broken rule, or None if all hold."""
    return next((sentence for rule in MODEL_RULES if (sentence := rule(model)) is not None), None)


def heads_divide_hidden_size(model: ModelConfig) -> str | None:
    if "head_dim" in model.model_fields_set or model.hidden_size % model.num_attention_heads == 0:
        return None
    return (
        f"model.hidden_size {model.hidden_size} is not a multiple of model.num_attention_heads "
        f"{model.num_attention_heads}: use a hidden_size of "
        f"{multiples_near(model.hidden_size, 2 * model.num_attention_heads)}, or set model.head_dim"
    )


def kv_heads_divide_heads(model: ModelConfig) -> str | None:
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    if heads % kv == 0:
        return None
    near = neighbours(kv, [size for size in range(1, heads + 1) if heads % size == 0])
    return (
        f"model.num_attention_heads {heads} is not a multiple of model.num_key_value_heads {kv}, so query "
        f"heads cannot share kv heads evenly: use {near} kv heads"
    )


def a_whole_head_rotates_pairs(model: ModelConfig) -> str | None:
    """Refuses an odd head_dim that rotates as a whole; an odd part of a head is rounded up, as transformers does."""
    if model.position_embedding != "rope" or model.head_dim % 2 == 0 or model.partial_rotary_factor < 1:
        return None
    return (
        f"model.head_dim {model.head_dim} is odd, but RoPE rotates pairs: use a head_dim of "
        f"{multiples_near(model.head_dim, 2)}, or a model.hidden_size of "
        f"{multiples_near(model.hidden_size, 2 * model.num_attention_heads)} with head_dim left out"
    )


def something_is_rotated(model: ModelConfig) -> str | None:
    if model.position_embedding != "rope" or int(model.head_dim * model.partial_rotary_factor) > 0:
        return None
    return (
        f"model.partial_rotary_factor {model.partial_rotary_factor:g} of model.head_dim {model.head_dim} is less than "
        f"one feature, so no position would be encoded: use at least {2 / model.head_dim:.4g}"
    )


def every_layer_has_a_type(model: ModelConfig) -> str | None:
    named, layers = len(model.layer_types), model.num_hidden_layers
    if named == layers:
        return None
    return (
        f"model.layer_types names {named} layers, but model.num_hidden_layers is {layers}: name {layers}, or set "
        "layer_types to null"
    )


def sliding_layers_have_a_window(model: ModelConfig) -> str | None:
    if model.sliding_window is not None or "sliding_attention" not in model.layer_types:
        return None
    return (
        f"model.layer_types has sliding_attention (layer {model.layer_types.index('sliding_attention')}), but "
        "model.sliding_window is null: set the window in tokens, or make it full_attention"
    )


def named_layers_exist(model: ModelConfig) -> str | None:
    for option in ("mlp_only_layers", "layers_without_rope"):
        beyond = [layer for layer in getattr(model, option) if layer >= model.num_hidden_layers]
        if beyond:
            return (
                f"model.{option} names layer {beyond[0]}, but the {model.num_hidden_layers} layers are counted from "
                f"0: use numbers up to {model.num_hidden_layers - 1}"
            )
    return None


def tokens_have_enough_experts(model: ModelConfig) -> str | None:
    if model.num_experts is None or model.num_experts_per_tok <= model.num_experts:
        return None
    return (
        f"model.num_experts_per_tok {model.num_experts_per_tok} is more than model.num_experts {model.num_experts}: "
        f"use at most {model.num_experts}"
    )


def expert_options_have_experts(model: ModelConfig) -> str | None:
    if model.num_experts is not None:
        return None
    for option in ("num_experts_per_tok", "norm_topk_prob", "mlp_only_layers"):
        if getattr(model, option) != ModelConfig.model_fields[option].default:
            return f"model.{option} is about experts, but model.num_experts is null: remove it, or set num_experts"
    return None


def experts_are_gated_without_biases(model: ModelConfig) -> str | None:
    if model.num_experts is None or (model.gated_mlp and not model.mlp_bias):
        return None
    found = "gated_mlp false" if not model.gated_mlp else "mlp_bias true"
    return (
        f"model.{found} does not go with model.num_experts {model.num_experts}, whose experts are gated and have no "
        "biases: remove one of them"
    )


def parallel_residual_is_pre_norm(model: ModelConfig) -> str | None:
    if not model.use_parallel_residual or model.norm_placement == "pre":
        return None
    return (
        f"model.norm_placement {model.norm_placement} does not go with model.use_parallel_residual true, where both "
        "parts of a block read norms of its input: use norm_placement pre"
    )


def full_width_norm_is_rms(model: ModelConfig) -> str | None:
    if model.query_key_norm != "full_width" or model.normalization == "rmsnorm":
        return None
    return (
        f"model.query_key_norm full_width does not go with model.normalization {model.normalization}: use rmsnorm, "
        "or query_key_norm per_head"
    )


def learned_positions_do_not_rotate(model: ModelConfig) -> str | None:
    if model.position_embedding != "learned":
        return None
    for option in ("rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "layers_without_rope"):
        if getattr(model, option) != ModelConfig.model_fields[option].default:
            return (
                f"model.{option} is about rotary embedding, but model.position_embedding is learned: remove it, or "
                "use position_embedding rope"
            )
    return None


def rope_scaling_is_complete(model: ModelConfig) -> str | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    needed, allowed = ROPE_FIELDS[scaling.rope_type]
    for field in type(scaling).model_fields:
        if field in needed and getattr(scaling, field) is None:
            return (
                f"model.rope_scaling.rope_type {scaling.rope_type} needs {', '.join(needed)}: set "
                f"model.rope_scaling.{field}"
            )
        if field not in ("rope_type", *needed, *allowed) and getattr(scaling, field) is not None:
            return (
                f"model.rope_scaling.{field} has no meaning with rope_type {scaling.rope_type}, which has "
                f"{', '.join((*needed, *allowed))}: remove it"
            )
    return None


def llama3_frequencies_are_ordered(model: ModelConfig) -> str | None:
    scaling = model.rope_scaling
    if scaling is None or scaling.low_freq_factor is None or scaling.high_freq_factor is None:
        return None
    if scaling.high_freq_factor > scaling.low_freq_factor:
        return None
    return (
        f"model.rope_scaling.high_freq_factor {scaling.high_freq_factor:g} must be larger than low_freq_factor "
        f"{scaling.low_freq_factor:g}: Llama 3.1 has 4 and 1"
    )


def longrope_has_a_factor_per_pair(model: ModelConfig) -> str | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    pairs = -(-int(model.head_dim * model.partial_rotary_factor) // 2)
    for field in ("short_factor", "long_factor"):
        factors = getattr(scaling, field)
        if factors is not None and len(factors) != pairs:
            return (
                f"model.rope_scaling.{field} has {len(factors)} numbers, but {pairs} pairs of features of a head are "
                f"rotated: give {pairs}"
            )
    return None


def scaling_divides_by_no_zero(model: ModelConfig) -> str | None:
    """Refuses values without a result: an exponent dim / (dim - 2), a logarithm of the base or of the first length."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    length = scaling.original_max_position_embeddings or model.max_position_embeddings
    match scaling.rope_type:
        case "dynamic" if int(model.head_dim * model.partial_rotary_factor) <= 2:
            return (
                "model.rope_scaling.rope_type dynamic needs more than 2 rotated features: use a larger model.head_dim"
            )
        case "yarn" if model.rope_theta == 1:
            return "model.rope_theta 1 rotates all features alike, which yarn cannot scale: use one above 1"
        case "longrope" if length == 1:
            return "model.rope_scaling.original_max_position_embeddings 1 is no length to scale: use one above 1"
    return None


MODEL_RULES: tuple[Callable[[ModelConfig], str | None], ...] = (
    heads_divide_hidden_size,
    a_whole_head_rotates_pairs,
    something_is_rotated,
    kv_heads_divide_heads,
    every_layer_has_a_type,
    sliding_layers_have_a_window,
    named_layers_exist,
    tokens_have_enough_experts,
    expert_options_have_experts,
    experts_are_gated_without_biases,
    parallel_residual_is_pre_norm,
    full_width_norm_is_rms,
    learned_positions_do_not_rotate,
    rope_scaling_is_complete,
    llama3_frequencies_are_ordered,
    longrope_has_a_factor_per_pair,
    scaling_divides_by_no_zero,
)
