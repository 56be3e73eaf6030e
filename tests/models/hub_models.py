"""Small models made by transformers, of every family and switch, with odd sizes and no weight left at its default."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

LLAMA_SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
STARCODER2_SIZES = {key: value for key, value in LLAMA_SIZES.items() if key != "rms_norm_eps"}


@dataclass(frozen=True)
class HubModel:
    name: str
    model_type: str
    switches: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        sizes = LLAMA_SIZES if self.model_type == "llama" else STARCODER2_SIZES
        return transformers.AutoConfig.for_model(self.model_type, **sizes | self.switches)

    def build(self) -> Any:
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(self.config()).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # biases of 0 and norms of 1 would hide a missing one
                parameter.copy_(torch.randn(parameter.shape) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
        return model

    def save(self, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
        self.build().to(dtype).save_pretrained(folder, **options)
        return folder

    def __str__(self) -> str:
        return self.name


HUB_MODELS = [
    HubModel("llama", "llama"),
    HubModel("llama-tied", "llama", {"tie_word_embeddings": True}),
    HubModel("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    HubModel("llama-attention-bias", "llama", {"attention_bias": True, "num_key_value_heads": 4}),
    HubModel("llama-wide-heads", "llama", {"head_dim": 20, "num_key_value_heads": 1}),
    HubModel("llama-geglu", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    HubModel("starcoder2", "starcoder2"),
    HubModel("starcoder2-tied", "starcoder2", {"tie_word_embeddings": True}),
    HubModel("starcoder2-plain", "starcoder2", {"use_bias": False, "hidden_act": "gelu", "norm_epsilon": 1e-3}),
]
