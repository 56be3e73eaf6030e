"""The family GLM-4-MoE (GLM-4.5 to 4.7): DeepSeek-V3's experts, grouped queries, RoPE on a half of each head.

The layers behind the last one, which predict tokens further ahead, are left out, as transformers does in training.
"""

from typing import Any

from megalite.config import ModelConfig
from models.families.deepseek_v2 import EXPERT_KEYS, FIRST_DENSE
from models.families.deepseek_v3 import LEFT_OUT
from models.hub.config_parts import ConfigPart, FamilyError, Keys
from models.hub.family import Family
from models.hub.rope_config import rope


def _write_norms(model: ModelConfig, _: Keys) -> dict[str, Any]:
    if model.query_key_norm == "full_width":
        raise FamilyError(
            f"model.query_key_norm full_width is no {model.model_type} model, which has per_head or none: change "
            "it, or model.model_type"
        )
    return {"use_qk_norm": model.query_key_norm == "per_head"}


HEAD_NORMS = ConfigPart(
    ("query_key_norm",),
    ("use_qk_norm",),
    lambda keys: {"query_key_norm": "per_head" if keys["use_qk_norm"] else "none"},
    _write_norms,
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys={
        **{option: key for option, key in EXPERT_KEYS.items() if option != "attention_output_bias"},
        **{"norm_topk_prob": "norm_topk_prob", "n_group": "n_group", "topk_group": "topk_group"},
    },
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    fixed={
        "attention_output_bias": False,
        "scoring_func": "sigmoid",
        "group_score": "top2_sum",
        "e_score_correction_bias": True,
        "fp32_router": True,
    },
    parts=(rope(rotated=0.5), HEAD_NORMS, FIRST_DENSE, LEFT_OUT),
    kept=("output_router_logits", "router_aux_loss_coef"),
    aliases={"n_routed_experts": "num_local_experts"},
    renamed={"balance.bias": "gate.e_score_correction_bias"},
    layers_left_out=True,
)
