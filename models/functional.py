"""Pointwise math of a decoder block with hand-written gradients, so that only what backward needs is kept.

In and out: local tensors, whatever the layout. Rotary embedding follows Hugging Face's half-split convention, so
conversion renames weights and never permutes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RotatedHeads(torch.autograd.Function):
    """One buffer holds q, k and v, and one their gradients: nothing is concatenated, and the input is not kept."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes = heads, kv_heads, kv_heads
        out = torch.empty_like(qkv)
        _rotate(qkv[:, :, :-kv_heads], cos, sin, out[:, :, :-kv_heads])
        q, k, v = out.split(ctx.sizes, dim=2)
        v.copy_(qkv[:, :, -kv_heads:])
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        first = grads[0]
        grad = first.new_empty((*first.shape[:2], sum(ctx.sizes), first.shape[-1]))
        q, k, v = grad.split(ctx.sizes, dim=2)
        _rotate(grads[0], cos, -sin, q)  # the inverse rotation is the transpose
        _rotate(grads[1], cos, -sin, k)
        v.copy_(grads[2])
        return grad, None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)


def rotated_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k with rotary embedding (Su 2021), and v, from `[batch, seq, heads + 2 kv_heads, head_dim]`.

    cos and sin `[batch|1, seq, 1, head_dim/2]`.
    """
    return _RotatedHeads.apply(qkv, cos, sin, heads, kv_heads)


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
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        torch.mul(grad, F.silu(gate), out=up_grad)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020) of `[..., 2 * features]`, keeping only its input."""
    return _SwiGLU.apply(gate_up)


def document_mask(positions: Tensor) -> Tensor:
    """Causal attention inside documents, bool `[batch, 1, seq, seq]`; positions `[batch, seq]`, 0 at a start."""
    document = (positions == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & causal_mask(positions.shape[1], positions.device)).unsqueeze(1)


def causal_mask(seq: int, device: torch.device) -> Tensor:
    """bool `[seq, seq]`, True where a token may look."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).tril_()
