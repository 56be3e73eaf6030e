"""Section `model.rope_scaling`: rotary embedding stretched beyond the length that a model was first trained on.

Names, defaults and formulas are transformers' (`modeling_rope_utils.py`), so that a config.json is copied and never
interpreted.
"""

from __future__ import annotations

from typing import Literal

from megalite.config.base import PositiveFloat, PositiveInt, Section


class RopeScaling(Section):
    """How the angles of rotary embedding differ from plain ones."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """The formula: position interpolation, NTK-aware growth of the base with the length, Llama 3.1, YaRN, LongRoPE."""

    factor: PositiveFloat | None = None
    """How many times longer the sequences get; every type but `longrope` needs it."""

    original_max_position_embeddings: PositiveInt | None = None
    """Length of the first training, in tokens. Left out: `model.max_position_embeddings`."""

    low_freq_factor: PositiveFloat | None = None
    """`llama3`: wavelengths above original length / this are stretched in full."""

    high_freq_factor: PositiveFloat | None = None
    """`llama3`: wavelengths below original length / this stay as they are."""

    attention_factor: PositiveFloat | None = None
    """`yarn`, `longrope`: what cos and sin are multiplied by. Left out: derived as the papers do."""

    beta_fast: PositiveFloat | None = None
    """`yarn`: rotations over the original length above which a dimension stays as it is. Left out: 32."""

    beta_slow: PositiveFloat | None = None
    """`yarn`: rotations over the original length below which a dimension is stretched in full. Left out: 1."""

    mscale: float | None = None
    """`yarn` as DeepSeek writes it: a numerator of the attention factor."""

    mscale_all_dim: float | None = None
    """`yarn` as DeepSeek writes it: a denominator of the attention factor."""

    truncate: bool | None = None
    """`yarn`: round the dimensions at which stretching begins and ends to whole ones. Left out: true."""

    short_factor: tuple[PositiveFloat, ...] | None = None
    """`longrope`: a divisor for each pair of dimensions, in sequences up to the original length."""

    long_factor: tuple[PositiveFloat, ...] | None = None
    """`longrope`: a divisor for each pair of dimensions, in longer sequences."""
