"""The family DeepSeek-V3, with R1 and Moonlight: latent attention, and experts behind sigmoids with a bias, in groups.

The layers behind the last one, which predict tokens further ahead, are left out, as transformers does in training.
"""

from typing import Any

from megalite.config import ModelConfig
from models.families.deepseek_v2 import EXPERT_KEYS, FIRST_DENSE, KEPT, LATENT_DEFAULTS, LATENTS
from models.hub.config_parts import ConfigPart, Keys
from models.hub.family import Family


def _write_left_out(model: ModelConfig, _: Keys) -> dict[str, Any]:
    return {"num_nextn_predict_layers": 0}


LEFT_OUT = ConfigPart((), ("num_nextn_predict_layers", "num_mtp_layers"), lambda _: {}, _write_left_out)
"""Layers of multi-token prediction: none are written."""

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys={**EXPERT_KEYS, "norm_topk_prob": "norm_topk_prob", "n_group": "n_group", "topk_group": "topk_group"},
    defaults={
        **LATENT_DEFAULTS,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
    },
    fixed={
        **{"scoring_func": "sigmoid", "group_score": "top2_sum", "e_score_correction_bias": True},
        "fp32_router": True,
    },
    parts=(LATENTS, FIRST_DENSE, LEFT_OUT),
    must_be={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    kept=KEPT,
    aliases={"n_routed_experts": "num_local_experts"},
    renamed={"balance.bias": "gate.e_score_correction_bias"},
    layers_left_out=True,
)
