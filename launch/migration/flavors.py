"""Sizes of the models that torchtitan calls by a name and a flavor, as its sources have them in 2026."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0}
_LLAMA3 |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}
_QWEN3 |= {"rms_norm_eps": 1e-6, "query_key_norm": "per_head", "max_position_embeddings": 40960}


def _sizes(base: dict[str, Any], hidden: int, inner: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**base, **sizes, "num_attention_heads": heads, **more}


FLAVORS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama3", "debugmodel"): _sizes(_LLAMA3, 256, 768, 6, 16, vocab_size=2048, num_key_value_heads=16),
    ("llama3", "1B"): _sizes(_LLAMA3, 2048, 8192, 16, 32, tie_word_embeddings=True),
    ("llama3", "3B"): _sizes(_LLAMA3, 3072, 8192, 28, 24, tie_word_embeddings=True),
    ("llama3", "8B"): _sizes(_LLAMA3, 4096, 14336, 32, 32),
    ("llama3", "70B"): _sizes(_LLAMA3, 8192, 28672, 80, 64),
    ("llama3", "405B"): _sizes(_LLAMA3, 16384, 53248, 126, 128),
    ("qwen3", "0.6B"): _sizes(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    ("qwen3", "1.7B"): _sizes(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    ("qwen3", "4B"): _sizes(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    ("qwen3", "8B"): _sizes(_QWEN3, 4096, 12288, 36, 32),
    ("qwen3", "14B"): _sizes(_QWEN3, 5120, 17408, 40, 40),
    ("qwen3", "32B"): _sizes(_QWEN3, 5120, 25600, 64, 64),
}
"""(model.name, model.flavor) -> options of the section `model`."""
