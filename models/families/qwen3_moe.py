"""The family Qwen3-MoE, Qwen3 with experts: some layers may be dense."""

from typing import Any

from megalite.config import ModelConfig
from models.hub.config_parts import ConfigPart, Keys, layers_of, one_window
from models.hub.family import Family


def _read_sparse(keys: Keys) -> dict[str, Any]:
    step, dense = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers") or []
    return {"mlp_only_layers": [layer for layer in layers_of(keys) if layer in dense or (layer + 1) % step]}


def _write_sparse(model: ModelConfig, kept: Keys) -> dict[str, Any]:
    dense = _read_sparse({**kept, "num_hidden_layers": model.num_hidden_layers})["mlp_only_layers"]
    if tuple(dense) == model.mlp_only_layers:
        return {key: kept[key] for key in SPARSE_LAYERS.keys if key in kept}
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(model.mlp_only_layers)}


SPARSE_LAYERS = ConfigPart(
    ("mlp_only_layers",), ("decoder_sparse_step", "mlp_only_layers"), _read_sparse, _write_sparse
)
"""Experts are in every `decoder_sparse_step`th layer except the listed ones."""

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={
        "attention_bias": "attention_bias",
        "attention_output_bias": "attention_bias",
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
    },
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "sliding_window": 4096,
    },
    fixed={"query_key_norm": "per_head"},
    parts=(one_window("use_sliding_window"), SPARSE_LAYERS),
    must_be={"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},  # in Qwen3-Coder's folders
    kept=(*SPARSE_LAYERS.keys, "max_window_layers", "output_router_logits", "router_aux_loss_coef"),
    aliases={"num_experts": "num_local_experts"},
)
