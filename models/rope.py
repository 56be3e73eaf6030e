"""Rotary position embedding (Su 2021): cos and sin of every position's angles."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[batch, seq, 1, head_dim/2]` in `dtype`, of angles in fp32."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions.to(torch.float32)[..., None, None] * (1.0 / theta**exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@lru_cache(maxsize=8)
def fixed_rotation(
    seq: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`rotation` of positions 0, 1, 2 ..., computed once for all layers and steps."""
    return rotation(torch.arange(seq, device=device).unsqueeze(0), head_dim, theta, dtype)
