"""Small models made by transformers, of every family and switch, with odd sizes and no weight left at its default.

`HUB_MODELS` is a fixed list that says what it is about; `hub_models(model_type)` draws any combination of a family's
switches for hypothesis.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tests.helpers.sizes import ODD_SIZES

SIZES: dict[str, Any] = {
    **ODD_SIZES,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_RMS = {**SIZES, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
_GEMMA = {
    **{key: value for key, value in _RMS.items() if key != "rope_theta"},
    **{"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7, "tie_word_embeddings": True},
}
_ALIKE_HEADS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
_DEEPSEEK = {
    **_RMS,
    **{"num_key_value_heads": 4, "rope_theta": 5e3, "q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 10},
    **{"qk_rope_head_dim": 6, "v_head_dim": 7, "moe_intermediate_size": 19, "n_routed_experts": 6},
    **{"num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
}

FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": _RMS,
    "mistral": {**_RMS, "sliding_window": 7},
    "ministral": {**_RMS, "head_dim": 12, "sliding_window": 7},
    "qwen2": {**_RMS, "max_window_layers": 1},
    "qwen3": {**_RMS, "head_dim": 20, "max_window_layers": 1},
    "gemma2": {**_GEMMA, "num_hidden_layers": 4, "rope_theta": 5e5},
    "gemma3_text": {**_GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3},
    "phi3": _RMS,
    "olmo2": _RMS,
    "olmo3": {**_RMS, "num_hidden_layers": 4, "sliding_window": 7},
    "gpt_neox": {**_ALIKE_HEADS, "hidden_size": 64, "rotary_emb_base": 5e3},
    "gpt2": {
        **{key: value for key, value in _ALIKE_HEADS.items() if key != "intermediate_size"},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True},
    },
    "smollm3": {**_RMS, "num_hidden_layers": 4, "no_rope_layer_interval": 3},
    "mixtral": {**_RMS, "head_dim": 12, "num_local_experts": 3},
    "qwen3_moe": {**_RMS, "head_dim": 20, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 19},
    "olmoe": {**_RMS, "num_experts": 5, "num_experts_per_tok": 2},
    "starcoder2": {key: value for key, value in _RMS.items() if key != "rms_norm_eps"},
    "deepseek_v2": {**_DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3": {**_DEEPSEEK, "num_experts_per_tok": 3, "num_nextn_predict_layers": 0},
    "glm4_moe": {
        **_RMS,
        **{"moe_intermediate_size": 19, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2},
        **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "num_nextn_predict_layers": 0},
    },
}

ROUTER_BIAS = "e_score_correction_bias"  # no parameter
WEIGHT_DEVIATION = 0.12  # enough for every switch to show, and logits within 1e-5 of exact ones in fp32

LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 16},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False}


def longrope(pairs: int, **others: Any) -> dict[str, Any]:
    """LongRoPE of heads of which `pairs` pairs of features are rotated, longer than 16 tokens."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 0.7 * pair for pair in range(pairs)],
        "original_max_position_embeddings": 16,
        **others,
    }


@dataclass(frozen=True)
class HubModel:
    """One model of transformers."""

    name: str
    model_type: str
    switches: dict[str, Any] = field(default_factory=dict)  # keys of config.json over FAMILY_SIZES

    def config(self) -> Any:
        values = deepcopy(FAMILY_SIZES[self.model_type] | self.switches)  # transformers writes into dicts it is given
        return transformers.AutoConfig.for_model(self.model_type, **values)

    def build(self) -> Any:
        """With no weight at its default: biases of 0 and norms of 1 would hide a missing one."""
        torch.manual_seed(11)
        # the fused implementation of experts takes only widths of whole 16 bytes
        model = transformers.AutoModelForCausalLM.from_config(self.config(), experts_implementation="eager")
        model.float().eval()
        usual = 0.0 if self.model_type.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
        with torch.no_grad():
            for parameter in model.parameters():
                center = usual if parameter.ndim == 1 else 0.0
                parameter.copy_(torch.randn(parameter.shape) * WEIGHT_DEVIATION + center)
            for name, buffer in model.named_buffers():
                if name.endswith(ROUTER_BIAS):
                    buffer.copy_(torch.randn(buffer.shape) * WEIGHT_DEVIATION)
        return model

    def save(self, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        self.build().to(dtype).save_pretrained(folder, **options)
        return folder

    def __str__(self) -> str:
        return self.name


def disk_tensors(model: Any, gradients: bool = False) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` writes, or the parameters' gradients under those names."""
    found = {name: parameter.grad if gradients else parameter for name, parameter in model.named_parameters()}
    if not gradients:
        found |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(ROUTER_BIAS)}
    return dict(revert_weight_conversion(model, {name: tensor.detach().clone() for name, tensor in found.items()}))


HUB_MODELS = [
    HubModel("llama", "llama"),
    HubModel("llama-tied", "llama", {"tie_word_embeddings": True}),
    HubModel("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    HubModel("llama-attention-bias", "llama", {"attention_bias": True, "num_key_value_heads": 4}),
    HubModel("llama-wide-heads", "llama", {"head_dim": 20, "num_key_value_heads": 1}),
    HubModel("llama-geglu", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    HubModel("llama-linear", "llama", {"rope_scaling": LINEAR}),
    HubModel("llama-dynamic", "llama", {"rope_scaling": DYNAMIC, "max_position_embeddings": 16}),
    HubModel("llama-3.1", "llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    HubModel("llama-yarn", "llama", {"rope_scaling": YARN}),
    HubModel("llama-deepseek-yarn", "llama", {"rope_scaling": DEEPSEEK_YARN}),
    HubModel("llama-longrope", "llama", {"rope_scaling": longrope(6, factor=4.0, attention_factor=1.1)}),
    HubModel("mistral", "mistral"),
    HubModel("mistral-no-window", "mistral", {"sliding_window": None, "head_dim": 20, "tie_word_embeddings": True}),
    HubModel("ministral", "ministral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    HubModel("qwen2", "qwen2"),
    HubModel("qwen2-tied-yarn", "qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN}),
    HubModel("qwen2-window", "qwen2", {"use_sliding_window": True, "sliding_window": 7}),
    HubModel("qwen3", "qwen3"),
    HubModel(
        "qwen3-tied-window",
        "qwen3",
        {"tie_word_embeddings": True, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7},
    ),
    HubModel("gemma2", "gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    HubModel("gemma2-untied-no-caps", "gemma2", {"tie_word_embeddings": False, "attn_logit_softcapping": None}),
    HubModel("gemma3", "gemma3_text", {"rope_scaling": LINEAR, "rope_local_base_freq": 300.0}),
    HubModel("gemma3-capped", "gemma3_text", {"final_logit_softcapping": 3.0, "attention_bias": True}),
    HubModel("phi3", "phi3", {"sliding_window": 7}),
    HubModel(
        "phi3-longrope",
        "phi3",
        {"rope_scaling": longrope(6), "original_max_position_embeddings": 16, "tie_word_embeddings": True},
    ),
    HubModel(
        "phi4-mini",
        "phi3",
        {
            **{"hidden_size": 64, "partial_rotary_factor": 0.75},
            **{"rope_scaling": longrope(6), "original_max_position_embeddings": 16},
        },
    ),
    HubModel("olmo2", "olmo2"),
    HubModel("olmo2-tied-biases", "olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    HubModel("olmo3", "olmo3", {"rope_theta": 5e5, "rope_scaling": YARN}),
    HubModel("gpt_neox", "gpt_neox"),
    HubModel("gpt_neox-sequential", "gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    HubModel("gpt_neox-odd-part", "gpt_neox", {"rotary_pct": 0.34}),
    HubModel("gpt_neox-tied-no-bias", "gpt_neox", {"tie_word_embeddings": True, "attention_bias": False}),
    HubModel("gpt2", "gpt2"),
    HubModel("gpt2-untied-wide", "gpt2", {"tie_word_embeddings": False, "n_inner": 101, "activation_function": "gelu"}),
    HubModel("smollm3", "smollm3", {"tie_word_embeddings": True}),
    HubModel(
        "smollm3-window",
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 7, "attention_bias": True, "mlp_bias": True},
    ),
    HubModel("mixtral", "mixtral"),
    HubModel("mixtral-tied-window", "mixtral", {"tie_word_embeddings": True, "sliding_window": 7}),
    HubModel("qwen3_moe", "qwen3_moe", {"norm_topk_prob": True}),
    HubModel(
        "qwen3_moe-some-dense",
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
    HubModel("olmoe", "olmoe"),
    HubModel(
        "olmoe-tied-biases", "olmoe", {"tie_word_embeddings": True, "attention_bias": True, "norm_topk_prob": True}
    ),
    HubModel("deepseek_v2", "deepseek_v2"),
    HubModel(
        "deepseek_v2-groups-yarn",
        "deepseek_v2",
        {
            **{"topk_method": "group_limited_greedy", "q_lora_rank": 18, "rope_scaling": DEEPSEEK_YARN},
            **{"routed_scaling_factor": 1.7, "attention_bias": True},
        },
    ),
    HubModel("deepseek_v3", "deepseek_v3"),
    HubModel(
        "deepseek_v3-plain-queries",
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_scaling": DEEPSEEK_YARN, "attention_bias": True},
    ),
    HubModel("glm4_moe", "glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    HubModel(
        "glm4_moe-no-groups",
        "glm4_moe",
        {
            **{"tie_word_embeddings": True, "head_dim": 20, "partial_rotary_factor": 0.7, "rope_scaling": YARN},
            **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False},
        },
    ),
    HubModel("starcoder2", "starcoder2"),
    HubModel("starcoder2-tied", "starcoder2", {"tie_word_embeddings": True, "sliding_window": 7}),
    HubModel("starcoder2-plain", "starcoder2", {"use_bias": False, "hidden_act": "gelu", "norm_epsilon": 1e-3}),
]

_BOTH = [False, True]
_SCALINGS = [None, LINEAR, DYNAMIC, LLAMA3, YARN, DEEPSEEK_YARN]
_GATED = ["silu", "gelu_pytorch_tanh", "gelu"]
_WINDOW = [None, 1, 7]
_SWITCHED_WINDOW = {"use_sliding_window": _BOTH, "sliding_window": [1, 7], "max_window_layers": [0, 2, 3]}
_CAPS = [None, 2.0]
_LAST_BUT_ONE_SLIDES = [None, ["full_attention", "full_attention", "sliding_attention", "full_attention"]]
_ONE_BASE = {kind: {"rope_type": "default", "rope_theta": 300.0} for kind in ("full_attention", "sliding_attention")}
_HEADS: dict[str, list[Any]] = {
    **{"tie_word_embeddings": _BOTH, "num_key_value_heads": [1, 2, 4]},
    **{"intermediate_size": [37, 101], "vocab_size": [65, 131]},
}
_ROPE: dict[str, list[Any]] = {"rope_theta": [300.0, 5e5], "rope_scaling": _SCALINGS, "head_dim": [12, 20]}
_COMMON = {**_HEADS, **_ROPE}
_DENSE = {**_COMMON, "hidden_act": _GATED}
_EXPERTS = {"num_experts_per_tok": [1, 2, 3], "hidden_act": _GATED}
_GEMMA_SWITCHES: dict[str, list[Any]] = {
    **_COMMON,
    **{"attention_bias": _BOTH, "query_pre_attn_scalar": [16, 9], "final_logit_softcapping": _CAPS},
    **{"sliding_window": [1, 7], "layer_types": _LAST_BUT_ONE_SLIDES},
}
_PHI_ROPE = [None, longrope(6), longrope(6, attention_factor=0.9), longrope(6, factor=3.0)]
_DEEPSEEK_SWITCHES: dict[str, list[Any]] = {
    **{"tie_word_embeddings": _BOTH, "intermediate_size": [37, 101], "vocab_size": [65, 131], "hidden_act": _GATED},
    **{"rope_theta": [300.0, 5e5], "rope_scaling": [None, LINEAR, YARN, DEEPSEEK_YARN], "attention_bias": _BOTH},
    **{"q_lora_rank": [None, 18], "kv_lora_rank": [14, 6], "qk_nope_head_dim": [10, 8], "qk_rope_head_dim": [6, 4]},
    **{"v_head_dim": [7, 10], "n_shared_experts": [1, 2], "first_k_dense_replace": [0, 1, 2], "topk_group": [1, 2]},
    **{"moe_intermediate_size": [19, 24], "routed_scaling_factor": [1.0, 1.7], "num_experts_per_tok": [1, 2]},
    "n_group": [2, 3],
}

SWITCHES: dict[str, dict[str, list[Any]]] = {
    "llama": {**_DENSE, "attention_bias": _BOTH, "mlp_bias": _BOTH},
    "mistral": {**_DENSE, "sliding_window": _WINDOW},
    "ministral": {**_DENSE, "sliding_window": [1, 7]},
    "qwen2": {**_DENSE, **_SWITCHED_WINDOW},
    "qwen3": {**_DENSE, **_SWITCHED_WINDOW, "attention_bias": _BOTH},
    "gemma2": {**_GEMMA_SWITCHES, "attn_logit_softcapping": _CAPS},
    "gemma3_text": {**_GEMMA_SWITCHES, "rope_local_base_freq": [1e4, 50.0], "sliding_window_pattern": [2, 3]},
    "phi3": {
        **_HEADS,
        **{"hidden_act": _GATED, "rope_theta": [300.0, 5e5], "rope_scaling": _PHI_ROPE, "sliding_window": _WINDOW},
        "original_max_position_embeddings": [16],
    },
    "olmo2": {**_DENSE, "attention_bias": _BOTH},
    "olmo3": {
        **_HEADS,
        **{"hidden_act": _GATED, "attention_bias": _BOTH, "sliding_window": [1, 7], "head_dim": [12, 20]},
        **{"rope_scaling": _SCALINGS, "rope_parameters": [None, _ONE_BASE], "layer_types": _LAST_BUT_ONE_SLIDES},
    },
    "gpt_neox": {
        **{"tie_word_embeddings": _BOTH, "intermediate_size": [37, 101], "vocab_size": [65, 131]},
        **{
            "hidden_act": ["gelu", "gelu_new", "gelu_fast", "relu"],
            "attention_bias": _BOTH,
            "use_parallel_residual": _BOTH,
        },
        **{"rotary_pct": [0.25, 0.5, 1.0], "rotary_emb_base": [300.0, 5e3], "rope_scaling": _SCALINGS},
    },
    "gpt2": {
        **{"tie_word_embeddings": _BOTH, "vocab_size": [65, 131], "n_inner": [None, 37]},
        "activation_function": ["gelu_new", "gelu", "relu"],
    },
    "smollm3": {
        **_DENSE,
        **{"attention_bias": _BOTH, "mlp_bias": _BOTH, "no_rope_layer_interval": [2, 3, 9]},
        **{"use_sliding_window": _BOTH, "sliding_window": [7]},
    },
    "mixtral": {**_COMMON, **_EXPERTS, "sliding_window": _WINDOW, "num_local_experts": [3, 4]},
    "qwen3_moe": {
        **_COMMON,
        **_EXPERTS,
        **{"attention_bias": _BOTH, "norm_topk_prob": _BOTH, "decoder_sparse_step": [1, 2], "num_experts": [3, 5]},
        **{"moe_intermediate_size": [19, 24], "mlp_only_layers": [[], [1]]},
        **{"use_sliding_window": _BOTH, "sliding_window": [7]},
    },
    "olmoe": {
        **{key: values for key, values in _COMMON.items() if key != "head_dim"},
        **_EXPERTS,
        **{"attention_bias": _BOTH, "norm_topk_prob": _BOTH, "num_experts": [3, 5]},
    },
    "deepseek_v2": {**_DEEPSEEK_SWITCHES, "topk_method": ["greedy", "group_limited_greedy"]},
    "deepseek_v3": {**_DEEPSEEK_SWITCHES, "norm_topk_prob": _BOTH},
    "glm4_moe": {
        **_COMMON,
        **{"hidden_act": _GATED, "attention_bias": _BOTH, "use_qk_norm": _BOTH, "norm_topk_prob": _BOTH},
        **{"partial_rotary_factor": [0.5, 1.0], "n_shared_experts": [1, 2], "first_k_dense_replace": [0, 1, 2]},
        **{"moe_intermediate_size": [19, 24], "routed_scaling_factor": [1.0, 1.7], "num_experts_per_tok": [1, 2]},
        **{"n_group": [2, 3], "topk_group": [1, 2]},
    },
    "starcoder2": {
        **_COMMON,
        "use_bias": _BOTH,
        "sliding_window": _WINDOW,
        "hidden_act": ["gelu_pytorch_tanh", "relu"],
    },
}
"""Family -> key of config.json -> the values that `hub_models` draws from."""


def hub_models(model_type: str) -> st.SearchStrategy[HubModel]:
    """Models of a family with any combination of its switches."""
    switches = {key: st.sampled_from(values) for key, values in SWITCHES[model_type].items()}
    return st.fixed_dictionaries(switches).map(lambda drawn: HubModel(model_type, model_type, drawn))
