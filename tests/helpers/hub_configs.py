"""config.json files as they lie on the hub, most written by transformers 4: what their keys are called matters here.

Layer counts are small where a file lists every layer; nothing else is changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
LLAMA_3_2_1B = CONFIGS["LLAMA_3_2_1B"]
SMOLLM2_135M = CONFIGS["SMOLLM2_135M"]
MISTRAL_7B = CONFIGS["MISTRAL_7B"]
QWEN2_5_0_5B = CONFIGS["QWEN2_5_0_5B"]
QWEN3_0_6B = CONFIGS["QWEN3_0_6B"]
GEMMA_2_2B = CONFIGS["GEMMA_2_2B"]
GEMMA_3_1B = CONFIGS["GEMMA_3_1B"]
PHI_3_MINI_4K = CONFIGS["PHI_3_MINI_4K"]
PHI_4_MINI: dict[str, Any] = {
    **PHI_3_MINI_4K,
    "_name_or_path": "microsoft/Phi-4-mini-instruct",
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1.0 + pair / 4 for pair in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0",
    "vocab_size": 200064,
}

OLMO_2_1B = CONFIGS["OLMO_2_1B"]
PYTHIA_70M = CONFIGS["PYTHIA_70M"]
GPT2 = CONFIGS["GPT2"]
SMOLLM3_3B: dict[str, Any] = {
    "_name_or_path": "HuggingFaceTB/SmolLM3-3B-Base",
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 8,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 128256,
}

MIXTRAL_8X7B: dict[str, Any] = {
    **MISTRAL_7B,
    "_name_or_path": "mistralai/Mixtral-8x7B-v0.1",
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "transformers_version": "4.36.0.dev0",
}

QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_0_6B,
    "_name_or_path": "Qwen/Qwen3-30B-A3B",
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}

OLMOE_1B_7B: dict[str, Any] = {
    **OLMO_2_1B,
    "_name_or_path": "allenai/OLMoE-1B-7B-0924",
    "architectures": ["OlmoeForCausalLM"],
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}

DEEPSEEK_V2_LITE: dict[str, Any] = {
    **{"_name_or_path": "deepseek-ai/DeepSeek-V2-Lite", "architectures": ["DeepseekV2ForCausalLM"]},
    **{"attention_bias": False, "attention_dropout": 0.0, "auto_map": {}, "aux_loss_alpha": 0.001},
    **{"bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu"},
    **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512},
    **{"max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408},
    **{"moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False},
    **{"num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16},
    **{"pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    **{"rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True},
    **{"tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400},
}

DEEPSEEK_V3: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK_V2_LITE.items() if key not in ("aux_loss_alpha", "seq_aux")},
    **{"_name_or_path": "deepseek-ai/DeepSeek-V3", "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 0},
    **{"eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432},
    **{"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8},
    **{"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536},
    **{"rope_scaling": {**DEEPSEEK_V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0}},
    **{"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc"},
    "vocab_size": 129280,
}

GLM_4_5_AIR: dict[str, Any] = {
    **{"_name_or_path": "zai-org/GLM-4.5-Air", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True},
    **{"attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1},
    **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02},
    **{"intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe"},
    **{"moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1},
    **{"norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46},
    **{"num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5},
    **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0},
    **{"tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.54.0"},
    **{"use_cache": True, "use_qk_norm": False, "vocab_size": 151552},
}

STARCODER2_3B = CONFIGS["STARCODER2_3B"]
# keys that folders of the same family have besides
SIBLINGS: list[dict[str, Any]] = [
    LLAMA_3_2_1B | {"_name_or_path": "unsloth/Llama-3.2-1B", "unsloth_fixed": True, "unsloth_version": "2024.9"},
    SMOLLM2_135M | {"_name_or_path": "huggyllama/llama-7b", "max_sequence_length": 2048},
    QWEN2_5_0_5B
    | {
        "_name_or_path": "Qwen/Qwen2.5-7B-Instruct-1M",
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
    },
    GEMMA_2_2B | {"_name_or_path": "google/gemma-2-9b", "sliding_window_size": 4096},
    GEMMA_3_1B | {"_name_or_path": "gemma-3-without-its-head", "architectures": ["Gemma3TextModel"]},
    PYTHIA_70M
    | {
        "_name_or_path": "EleutherAI/gpt-neox-20b",
        "attention_probs_dropout_prob": 0,
        "hidden_act": "gelu_fast",
        "hidden_dropout_prob": 0,
    },
    GPT2 | {"_name_or_path": "openai-community/gpt2-medium", "n_special": 0, "predict_special_tokens": True},
    GPT2 | {"_name_or_path": "openai-community/gpt2-xl", "output_past": True},
    GPT2 | {"_name_or_path": "distilbert/distilgpt2", "_num_labels": 1, "n_layer": 6},
    QWEN3_30B_A3B
    | {
        "_name_or_path": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "qkv_bias": False,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
]

HUB_CONFIGS = [
    *(LLAMA_3_2_1B, SMOLLM2_135M, MISTRAL_7B, QWEN2_5_0_5B, QWEN3_0_6B, GEMMA_2_2B, GEMMA_3_1B, PHI_3_MINI_4K),
    *(PHI_4_MINI, OLMO_2_1B, PYTHIA_70M, GPT2, SMOLLM3_3B, MIXTRAL_8X7B, QWEN3_30B_A3B, OLMOE_1B_7B, STARCODER2_3B),
    *(DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_4_5_AIR),
    *SIBLINGS,
]
