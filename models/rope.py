"""Rotary position embedding (Su 2021), plain and scaled: cos and sin of every position's angles.

In: the parameters of a layer's angles (`Rope`), and positions `[batch, seq]`. Out: cos and sin
`[batch|1, seq, 1, pairs]` for `models.attention.rotated`. Formulas, and the order of their roundings, are
transformers' (`modeling_rope_utils.py`): angles are fp32 whatever the dtype, so an error in the last bit of a frequency
is multiplied by the position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.config.model import RopeScaling


@dataclass(frozen=True)
class Rope:
    """Parameters of the angles of a layer, besides positions; layers with the same rotation have equal ones."""

    dim: int  # rotated features of a head; an odd number is rounded up, as in transformers
    base: float
    max_positions: int  # max_position_embeddings
    scaling: RopeScaling | None

    @property
    def depends_on_length(self) -> bool:
        """True if a token's angle depends on the length of its sequence, not only on its position."""
        return self.scaling is not None and self.scaling.rope_type in ("dynamic", "longrope")

    @property
    def original_length(self) -> int:
        """Sequence length of the original training, in tokens."""
        assert self.scaling is not None
        return self.scaling.original_max_position_embeddings or self.max_positions

    @property
    def factor(self) -> float:
        """Ratio of the extended to the original sequence length."""
        assert self.scaling is not None
        return self.scaling.factor or self.max_positions / self.original_length


def rope_of_layer(model: ModelConfig, layer: int) -> Rope | None:
    """Returns the rotary embedding of block `layer`, or None without one."""
    dim = model.rotary_dim(layer)
    if dim == 0:
        return None
    if model.rope_local_base_freq is not None and model.has_window(layer):
        return Rope(dim, model.rope_local_base_freq, model.max_position_embeddings, None)
    return Rope(dim, model.rope_theta, model.max_position_embeddings, model.rope_scaling)


def rotation(positions: Tensor, rope: Rope, dtype: torch.dtype, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns cos and sin `[batch, seq, 1, pairs]` in `dtype`, of fp32 angles, for positions `[batch, seq]`.

    If angles depend on the length, it is `length`, or by default that of each token's own document, so that a document
    is rotated in the same way whatever it is packed with.
    """
    if rope.depends_on_length:
        lengths = document_lengths(positions) if length is None else torch.full_like(positions[:1, :1], length)
        frequencies = _frequencies_at(lengths, rope)
    else:
        frequencies = _fixed_frequencies(rope, positions.device)
    angle = (positions.to(torch.float32)[..., None] * frequencies).unsqueeze(2)
    scale = attention_factor(rope)
    return angle.cos().mul_(scale).to(dtype), angle.sin().mul_(scale).to(dtype)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # training may reuse what generation has cached
def fixed_rotation(
    seq: int, rope: Rope, device: torch.device, dtype: torch.dtype, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Caches `rotation` of positions start, start + 1 ... in sequences of `start + seq` tokens, for all layers."""
    positions = torch.arange(start, start + seq, device=device).unsqueeze(0)
    return rotation(positions, rope, dtype, start + seq)


def document_lengths(positions: Tensor) -> Tensor:
    """Returns the length of each token's document, `[batch, seq]`; positions `[batch, seq]`, 0 at a start."""
    document = (positions == 0).cumsum(dim=1)
    longest = positions.new_zeros(positions.shape[0], positions.shape[1] + 1)
    return longest.scatter_reduce_(1, document, positions + 1, "amax").gather(1, document)


def attention_factor(rope: Rope) -> float:
    """Returns the factor of cos and sin; attention scores are multiplied by its square."""
    scaling = rope.scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":  # Ding 2024
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_scale(rope.factor, scaling.mscale) / _yarn_scale(rope.factor, scaling.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def score_factor(rope: Rope) -> float:
    """Returns the factor of scores by which latent attention makes up for that of cos and sin, which rotates only a
    part of its heads (DeepSeek)."""
    scaling = rope.scaling
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _yarn_scale(rope.factor, scaling.mscale_all_dim) ** 2


def _yarn_scale(factor: float, mscale: float) -> float:
    """The square root of 1/t in Peng 2023, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _fixed_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Returns radians per position `[pairs]`, fp32; computed on the CPU, as in transformers."""
    kind = None if rope.scaling is None else rope.scaling.rope_type
    if kind == "linear":
        frequencies = _powers(rope.base, rope.dim) / rope.factor
    elif kind == "llama3":
        frequencies = _llama3(rope)
    elif kind == "yarn":
        frequencies = _yarn(rope)
    else:
        frequencies = _powers(rope.base, rope.dim)
    return frequencies.to(device)


def _powers(base: float | Tensor, dim: int) -> Tensor:
    """Returns plain frequencies `[..., pairs]` for one base or bases `[..., 1]`."""
    device = base.device if isinstance(base, Tensor) else None
    return 1.0 / base ** (torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)


def _llama3(rope: Rope) -> Tensor:
    """Frequencies of Llama 3.1: low ones are divided by the factor, high ones stay, those between are interpolated."""
    scaling, plain, length = rope.scaling, _powers(rope.base, rope.dim), rope.original_length
    assert scaling is not None and scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain  # in tokens
    smooth = (length / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    divided = torch.where(wavelength > length / low, plain / rope.factor, plain)
    is_between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(is_between, blended, divided)


def _yarn(rope: Rope) -> Tensor:
    """Frequencies of YaRN (Peng 2023, section 3.2): a linear ramp over the dimensions from plain to divided ones."""
    scaling, dim = rope.scaling, rope.dim
    assert scaling is not None
    low = _dimension_of_turns(scaling.beta_fast or 32, rope)
    high = _dimension_of_turns(scaling.beta_slow or 1, rope)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wave = rope.base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wave) * (1 - kept) + 1.0 / wave * kept


def _dimension_of_turns(times: float, rope: Rope) -> float:
    """Returns the dimension, counted in pairs, whose wave turns that many times within the original length."""
    return rope.dim * math.log(rope.original_length / (times * 2 * math.pi)) / (2 * math.log(rope.base))


def _frequencies_at(lengths: Tensor, rope: Rope) -> Tensor:
    """Returns radians per position `[batch|1, seq|1, pairs]` in sequences of `lengths` tokens, `[batch|1, seq|1]`."""
    assert rope.scaling is not None
    lengths = lengths.unsqueeze(-1)
    if rope.scaling.rope_type == "longrope":
        short, long = _longrope(rope, lengths.device)
        return torch.where(lengths > rope.original_length, long, short)
    # dynamic NTK: beyond max_positions the base grows with the length
    factor, dim, longest = rope.scaling.factor, rope.dim, rope.max_positions
    assert factor is not None
    growth = ((factor * lengths / longest) - (factor - 1)) ** (dim / (dim - 2))
    return torch.where(lengths > longest, _powers(rope.base * growth, dim), _fixed_frequencies(rope, lengths.device))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _longrope(rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns frequencies `[pairs]` up to the original length, and beyond it."""
    scaling = rope.scaling
    assert scaling is not None and scaling.short_factor is not None and scaling.long_factor is not None
    wave = rope.base ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    short, long = (1.0 / (torch.tensor(factors) * wave) for factors in (scaling.short_factor, scaling.long_factor))
    return short.to(device), long.to(device)
