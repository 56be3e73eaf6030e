"""Pointwise math of a decoder block with hand-written gradients, so that only what backward needs is kept.

In and out: local tensors, whatever the layout. Rotary embedding follows Hugging Face's half-split convention, so
conversion renames weights and never permutes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None  # the inverse rotation is the transpose


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su 2021): x `[batch, seq, heads, head_dim]`, cos and sin `[batch|1, seq, 1, head_dim/2]`."""
    return _RotateHeads.apply(x, cos, sin)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        gate_grad, up_grad = out.chunk(2, dim=-1)
        gate_grad.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        torch.mul(grad, F.silu(gate), out=up_grad)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020) of `[..., 2 * features]`, keeping only its input."""
    return _SwiGLU.apply(gate_up)


def document_mask(positions: Tensor) -> Tensor:
    """Causal attention inside documents, bool `[batch, 1, seq, seq]`; positions `[batch, seq]`, 0 at a start."""
    document = (positions == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    causal = torch.ones(positions.shape[1], positions.shape[1], dtype=torch.bool, device=positions.device).tril_()
    return (same & causal).unsqueeze(1)
