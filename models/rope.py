"""Rotary position embedding (Su 2021), plain and scaled: cos and sin of every position's angles.

In: what the angles of a layer depend on (`Rope`), and positions `[batch, seq]`. Out: cos and sin
`[batch|1, seq, 1, pairs]` for `models.functional.rotated_heads`. Formulas, and the order of their roundings, are
transformers' (`modeling_rope_utils.py`): angles are fp32 whatever the dtype, so a frequency that differs in its last
bit moves the angle of a far position by as much as the position is far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.config.rope import RopeScaling


@dataclass(frozen=True)
class Rope:
    """All that the angles of a layer depend on, but for positions; layers that rotate alike have equal ones."""

    dim: int  # features of a head that are rotated; an odd number is rounded up, as transformers does
    base: float
    max_positions: int  # max_position_embeddings
    scaling: RopeScaling | None

    @property
    def depends_on_length(self) -> bool:
        """True where a token's angle depends on how long its sequence is, not on its position alone."""
        return self.scaling is not None and self.scaling.rope_type in ("dynamic", "longrope")

    @property
    def original_length(self) -> int:
        """Tokens in the sequences of the first training."""
        assert self.scaling is not None
        return self.scaling.original_max_position_embeddings or self.max_positions

    @property
    def stretch(self) -> float:
        """How many times longer than in the first training sequences get."""
        assert self.scaling is not None
        return self.scaling.factor or self.max_positions / self.original_length


def rope_of_layer(model: ModelConfig, layer: int) -> Rope | None:
    """None: attention of block `layer` rotates nothing."""
    dim = model.rotary_dim(layer)
    if dim == 0:
        return None
    if model.rope_local_base_freq is not None and model.has_window(layer):
        return Rope(dim, model.rope_local_base_freq, model.max_position_embeddings, None)
    return Rope(dim, model.rope_theta, model.max_position_embeddings, model.rope_scaling)


def rotation(positions: Tensor, rope: Rope, dtype: torch.dtype, length: int | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin `[batch, seq, 1, pairs]` in `dtype`, of angles in fp32, for positions `[batch, seq]`.

    Where angles depend on the length it is `length`, or, where that is None, that of each token's own document, so
    that a document is rotated alike whatever it is packed with.
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
@torch.inference_mode(False)  # a later step in training may find what generation left here
def fixed_rotation(
    seq: int, rope: Rope, device: torch.device, dtype: torch.dtype, start: int = 0
) -> tuple[Tensor, Tensor]:
    """`rotation` of positions start, start + 1 ... of sequences `start + seq` long, once for all layers and steps."""
    positions = torch.arange(start, start + seq, device=device).unsqueeze(0)
    return rotation(positions, rope, dtype, start + seq)


def document_lengths(positions: Tensor) -> Tensor:
    """Tokens in each token's document, `[batch, seq]`; positions `[batch, seq]`, 0 at a document's start."""
    document = (positions == 0).cumsum(dim=1)
    longest = positions.new_zeros(positions.shape[0], positions.shape[1] + 1)
    return longest.scatter_reduce_(1, document, positions + 1, "amax").gather(1, document)


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by, and attention scores with its square."""
    scaling = rope.scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "longrope":  # Ding 2024
        return 1.0 if rope.stretch <= 1 else math.sqrt(1 + math.log(rope.stretch) / math.log(rope.original_length))
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_scale(rope.stretch, scaling.mscale) / _yarn_scale(rope.stretch, scaling.mscale_all_dim)
    return _yarn_scale(rope.stretch, 1.0)


def _yarn_scale(stretch: float, mscale: float) -> float:
    """Peng 2023, section 3.4: the square root of 1/t."""
    return 1.0 if stretch <= 1 else 0.1 * mscale * math.log(stretch) + 1.0


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _fixed_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Radians per position `[pairs]`, fp32; computed on the CPU, as transformers does."""
    kind = None if rope.scaling is None else rope.scaling.rope_type
    if kind == "linear":
        frequencies = _powers(rope.base, rope.dim) / rope.stretch
    elif kind == "llama3":
        frequencies = _llama3(rope)
    elif kind == "yarn":
        frequencies = _yarn(rope)
    else:
        frequencies = _powers(rope.base, rope.dim)
    return frequencies.to(device)


def _powers(base: float | Tensor, dim: int) -> Tensor:
    """Plain frequencies `[..., pairs]`, of one base or of bases `[..., 1]`."""
    device = base.device if isinstance(base, Tensor) else None
    return 1.0 / base ** (torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)


def _llama3(rope: Rope) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones stay, and those between are blended."""
    scaling, plain, length = rope.scaling, _powers(rope.base, rope.dim), rope.original_length
    assert scaling is not None and scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain  # in tokens
    smooth = (length / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / rope.stretch + smooth * plain
    stretched = torch.where(wavelength > length / low, plain / rope.stretch, plain)
    is_between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: Rope) -> Tensor:
    """Peng 2023, section 3.2: a ramp over the dimensions from plain to stretched frequencies."""
    scaling, dim = rope.scaling, rope.dim
    assert scaling is not None
    low = _dimension_turning(scaling.beta_fast or 32, rope)
    high = _dimension_turning(scaling.beta_slow or 1, rope)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wave = rope.base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - ramp
    return 1.0 / (rope.stretch * wave) * (1 - kept) + 1.0 / wave * kept


def _dimension_turning(times: float, rope: Rope) -> float:
    """The dimension, counted in pairs, whose wave turns that many times within the original length."""
    return rope.dim * math.log(rope.original_length / (times * 2 * math.pi)) / (2 * math.log(rope.base))


def _frequencies_at(lengths: Tensor, rope: Rope) -> Tensor:
    """Radians per position `[batch|1, seq|1, pairs]` in sequences of so many tokens `[batch|1, seq|1]`."""
    assert rope.scaling is not None
    lengths = lengths.unsqueeze(-1)
    if rope.scaling.rope_type == "longrope":
        short, long = _longrope(rope, lengths.device)
        return torch.where(lengths > rope.original_length, long, short)
    # dynamic NTK: the base grows with the length, beyond what the model is meant for
    factor, dim, longest = rope.scaling.factor, rope.dim, rope.max_positions
    assert factor is not None
    growth = ((factor * lengths / longest) - (factor - 1)) ** (dim / (dim - 2))
    return torch.where(lengths > longest, _powers(rope.base * growth, dim), _fixed_frequencies(rope, lengths.device))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _longrope(rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies `[pairs]` up to the original length, and beyond it."""
    scaling = rope.scaling
    assert scaling is not None and scaling.short_factor is not None and scaling.long_factor is not None
    wave = rope.base ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    short, long = (1.0 / (torch.tensor(factors) * wave) for factors in (scaling.short_factor, scaling.long_factor))
    return short.to(device), long.to(device)
