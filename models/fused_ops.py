"""Pointwise operations of a decoder block with hand-written gradients, which keep only what backward needs.

In and out: local tensors, whatever the layout. Rotary embedding follows Hugging Face's half-split convention, so
conversion renames weights and never permutes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RotatedHeads(torch.autograd.Function):
    """Uses one buffer for q, k and v, and one for their gradients: concatenates nothing and does not keep the input."""

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


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, torch.empty_like(grad)), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Rotates the first features of each head in pairs (i, i + pairs) and copies the others to `out`."""
    pairs = cos.shape[-1]
    first, second, others = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    torch.mul(first, cos, out=out[..., :pairs]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., pairs : 2 * pairs]).addcmul_(first, sin)
    if others.shape[-1]:
        out[..., 2 * pairs :] = others
    return out


def rotated_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k with rotary embedding (Su 2021), and v, from `[batch, seq, heads + 2 kv_heads, head_dim]`.

    cos and sin `[batch|1, seq, 1, pairs]`: the first `2 * pairs` features of a head are rotated.
    """
    return _RotatedHeads.apply(qkv, cos, sin, heads, kv_heads)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to `[batch, seq, heads, head_dim]`; cos and sin as in `rotated_heads`."""
    return _Rotated.apply(x, cos, sin)


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
    """Computes `silu(gate) * up` (Shazeer 2020) of `[..., 2 * features]`, keeping only its input."""
    return _SwiGLU.apply(gate_up)
