"""The family GPT-2: learned positions, LayerNorm, and matrices that are transposed on disk (Conv1D)."""

from typing import Any

from megalite.config import ModelConfig
from models.hub.config_parts import ConfigPart, Keys
from models.hub.family import Family
from models.hub.rope_config import NO_ROPE


def _write_inner(model: ModelConfig, kept: Keys) -> dict[str, Any]:
    is_derived = kept.get("n_inner") is None and model.intermediate_size == 4 * model.hidden_size
    return {"n_inner": None if is_derived else model.intermediate_size}


INNER = ConfigPart(
    ("intermediate_size",),
    ("n_inner",),
    lambda keys: {"intermediate_size": keys.get("n_inner") or 4 * keys["n_embd"]},
    _write_inner,
)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    fixed={
        "normalization": "layernorm",
        "gated_mlp": False,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
    },
    derived=("num_key_value_heads", "head_dim"),
    parts=(INNER, NO_ROPE),
    must_be={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    kept=(
        *("n_inner", "n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("n_special", "predict_special_tokens"),
    ),
    renamed={
        "model.embed_tokens": "transformer.wte",
        "model.embed_positions": "transformer.wpe",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    fused={"attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    base_prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
