"""The family OLMoE: experts in every layer, and as in OLMo-2 RMSNorm on all heads of q and k at once."""

from models.hub.family import Family

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    keys={
        "attention_bias": "attention_bias",
        "attention_output_bias": "attention_bias",
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={"query_key_norm": "full_width", "mlp_only_layers": ()},
    derived=("head_dim",),  # its norms are as wide as the hidden state
    must_be={"clip_qkv": None},
    kept=("output_router_logits", "router_aux_loss_coef"),
    aliases={"num_experts": "num_local_experts"},
)
