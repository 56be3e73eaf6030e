"""StarCoder2 without its sliding window: LayerNorm, a plain GELU feed-forward part, biases everywhere."""

from __future__ import annotations

from models.families.base import Family

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden_act": "hidden_act",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
        "rms_norm_eps": "norm_epsilon",
        "max_position_embeddings": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
        "initializer_range": "initializer_range",
    },
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.018042,
    },
    fixed={"normalization": "layernorm", "gated_mlp": False},
    must_be={"sliding_window": None},
    kept=("embedding_dropout", "residual_dropout"),
    renamed={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
)
