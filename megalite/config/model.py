"""Section `model`: the architecture, in Hugging Face's spelling. Families are known elsewhere."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megalite.config.base import DerivedInt, PositiveFloat, PositiveInt, Probability, Section

DERIVED = ("num_key_value_heads", "head_dim")
DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")


def _one_kv_head_per_head(data: dict[str, Any]) -> int:
    return int(data["num_attention_heads"])


def _hidden_size_per_head(data: dict[str, Any]) -> int:
    """Rounds down; a hidden_size that does not divide is refused in rules.py, with numbers."""
    return int(data["hidden_size"] // data["num_attention_heads"])


class ModelConfig(Section):
    """Shape and mathematics of the transformer."""

    model_type: str = "llama"
    """Model family, Hugging Face's name for it."""

    vocab_size: PositiveInt
    """Number of token ids. Any size works with any tensor parallelism: the embedding is padded internally."""

    hidden_size: PositiveInt
    """Width of the residual stream."""

    intermediate_size: PositiveInt
    """Width of the feed-forward layer. Any size works with any tensor parallelism."""

    num_hidden_layers: PositiveInt
    """Number of transformer blocks."""

    num_attention_heads: PositiveInt
    """Number of query heads; a multiple of `parallel.tensor_parallel_size`."""

    num_key_value_heads: DerivedInt = Field(default_factory=_one_kv_head_per_head)
    """Number of key and value heads (grouped-query attention). Left out or null: `num_attention_heads`."""

    head_dim: DerivedInt = Field(default_factory=_hidden_size_per_head)
    """Width of one head, even (RoPE rotates pairs). Left out or null: `hidden_size / num_attention_heads`."""

    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh"] = "silu"
    """Activation function of the feed-forward layer."""

    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of every norm in the model."""

    gated_mlp: bool = True
    """Feed-forward layer with a gate (SwiGLU with `silu`), instead of two plain projections."""

    attention_bias: bool = False
    """Biases in the attention projections."""

    mlp_bias: bool = False
    """Biases in the feed-forward projections."""

    rms_norm_eps: PositiveFloat = 1e-6
    """Epsilon of every norm, whichever `normalization` is chosen."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""

    max_position_embeddings: PositiveInt = 2048
    """Longest sequence the model is meant for, in tokens."""

    tie_word_embeddings: bool = False
    """Use the embedding's weight as the output head's."""

    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    attention_dropout: Probability = 0.0
    """Fraction of attention probabilities dropped in training; all then exist, `sequence_length` squared a head."""

    residual_dropout: Probability = 0.0
    """Fraction of the numbers that attention and feed-forward layer add to the residual stream dropped in training."""

    embedding_dropout: Probability = 0.0
    """Fraction of the numbers of the token embeddings dropped in training."""

    @property
    def has_dropout(self) -> bool:
        """Whether training needs sample numbers. Masks are a function of them, so they are equal on every layout."""
        return any(getattr(self, name) > 0 for name in DROPOUTS)

    @model_validator(mode="before")
    @classmethod
    def _null_means_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if not (key in DERIVED and value is None)}
