"""The family DeepSeek-V2, with V2-Lite and Coder-V2: latent attention, and experts behind a softmax, in groups."""

from typing import Any

from megalite.config import ModelConfig
from models.hub.config_parts import LATENT_OPTIONS, ConfigPart, FamilyError, Keys
from models.hub.family import Family


def _read_latents(keys: Keys) -> dict[str, Any]:
    sizes = {option: keys[option] for option in LATENT_OPTIONS}
    return {**sizes, "head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]}


def _write_latents(model: ModelConfig, _: Keys) -> dict[str, Any]:
    if model.kv_lora_rank is None:
        raise FamilyError(f"model.kv_lora_rank null is no {model.model_type} model: set it, or model.model_type")
    return {option: getattr(model, option) for option in LATENT_OPTIONS}


LATENTS = ConfigPart(
    # transformers 5 writes the last two, and computes them from the others
    (*LATENT_OPTIONS, "head_dim"),
    (*LATENT_OPTIONS, "head_dim", "qk_head_dim"),
    _read_latents,
    _write_latents,
)
"""Widths of latent attention."""


def _read_dense(keys: Keys) -> dict[str, Any]:
    return {"mlp_only_layers": list(range(min(keys["first_k_dense_replace"], keys["num_hidden_layers"])))}


def _write_dense(model: ModelConfig, _: Keys) -> dict[str, Any]:
    count = len(model.mlp_only_layers)
    if sorted(model.mlp_only_layers) != list(range(count)):
        raise FamilyError(
            f"model.mlp_only_layers {list(model.mlp_only_layers)} is no {model.model_type} model, whose dense layers "
            f"are the first ones: use {list(range(count))}"
        )
    return {"first_k_dense_replace": count}


FIRST_DENSE = ConfigPart(("mlp_only_layers",), ("first_k_dense_replace",), _read_dense, _write_dense)
"""The first layers are dense."""

GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


def _read_groups(keys: Keys) -> dict[str, Any]:
    if (method := keys.get("topk_method")) not in (GREEDY, IN_GROUPS):
        raise FamilyError(f"config.json has topk_method {method!r}: a deepseek_v2 model has {GREEDY} or {IN_GROUPS}")
    options = ("n_group", "topk_group")
    return {option: keys[option] if method == IN_GROUPS else 1 for option in options}


def _write_groups(model: ModelConfig, kept: Keys) -> dict[str, Any]:
    options = {"n_group": model.n_group, "topk_group": model.topk_group}
    if "topk_method" in kept and _read_groups(kept) == options:  # where groups are not used, they may be any
        return {key: kept[key] for key in GROUPS.keys if key in kept}
    return {"topk_method": GREEDY if model.n_group == model.topk_group else IN_GROUPS, **options}


GROUPS = ConfigPart(("n_group", "topk_group"), ("topk_method", "n_group", "topk_group"), _read_groups, _write_groups)

EXPERT_KEYS = {
    "attention_bias": "attention_bias",
    "attention_output_bias": "attention_bias",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
}
LATENT_DEFAULTS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENT_DEFAULTS |= {"v_head_dim": 128}
KEPT = ("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef")

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    keys=EXPERT_KEYS,
    defaults={
        **LATENT_DEFAULTS,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "topk_method": GREEDY,
        "n_group": None,
        "topk_group": None,
    },
    fixed={"norm_topk_prob": False, "fp32_router": True},
    parts=(LATENTS, FIRST_DENSE, GROUPS),
    must_be={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False},
    kept=(*KEPT, *GROUPS.keys),
    aliases={"n_routed_experts": "num_experts"},
)
