"""The family GPT-NeoX, with Pythia: attention and feed-forward layer side by side, q, k and v fused head by head."""

from models.hub.family import Family
from models.hub.rope_config import rope

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys={
        "attention_bias": "attention_bias",
        "attention_output_bias": "attention_bias",
        "use_parallel_residual": "use_parallel_residual",
        "rms_norm_eps": "layer_norm_eps",
    },
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True},
    fixed={"normalization": "layernorm", "gated_mlp": False, "mlp_bias": True},
    derived=("num_key_value_heads", "head_dim"),
    parts=(rope(theta_key="rotary_emb_base", rotated=0.25, rotated_key="rotary_pct"),),
    must_be={"is_decoder": False},
    kept=("hidden_dropout", "classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
    renamed={
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.layers": "gpt_neox.layers",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    fused={"attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    fused_by_head=True,
    head="embed_out.weight",
    base_prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
