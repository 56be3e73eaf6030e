"""Llama and everything that calls itself `llama`: Llama 2, TinyLlama, SmolLM2, Yi, DeepSeek's distillations."""

from __future__ import annotations

from models.families.base import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden_act": "hidden_act",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "rms_norm_eps": "rms_norm_eps",
        "max_position_embeddings": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
        "initializer_range": "initializer_range",
    },
    defaults={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    fixed={"normalization": "rmsnorm", "gated_mlp": True},
    must_be={"rope_interleaved": False},
    kept=("is_llama_config",),
)
