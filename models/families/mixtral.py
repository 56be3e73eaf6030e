"""The family Mixtral: Mistral with experts in every layer, two of eight for each token."""

from models.hub.config_parts import one_window
from models.hub.family import Family
from models.hub.rope_config import rope

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "intermediate_size",
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    fixed={"norm_topk_prob": True, "mlp_only_layers": ()},
    parts=(rope(theta=1e6), one_window()),
    must_be={"router_jitter_noise": 0.0},
    kept=("output_router_logits", "router_aux_loss_coef"),
    renamed={"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
)
