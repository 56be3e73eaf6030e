"""Sizes of the tests' models."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320
# no product of powers of two, so that a wrong axis or a missing remainder shows
ODD_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
TINY_SIZES: dict[str, Any] = {  # it steps in milliseconds
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
