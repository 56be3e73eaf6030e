"""Stand-ins on the meta device for what CUDA runs as one kernel, each way: attention, RMSNorm, fused passes.

torch has no kernel there for any, and would show the many operations they are defined by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import models.attention as attention
import models.attention_inputs as attention_inputs
from models.attention_kernels import why_not_flash


@torch.library.custom_op("one_kernel::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("only shapes exist")


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("one_kernel::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, x: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("only shapes exist")


@_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, inverse_rms: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


_rms_norm.register_autograd(
    lambda ctx, grad, _: _rms_norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1], inputs[1]),
)


@torch.library.custom_op("one_kernel::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    raise AssertionError("only shapes exist")


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, seq, head_dim = q.shape
    context = q.new_empty(batch, seq, heads, head_dim).transpose(1, 2)
    return context, q.new_empty(batch, heads, seq, dtype=torch.float32)


@torch.library.custom_op("one_kernel::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    raise AssertionError("only shapes exist")


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_attention(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask = inputs
    ctx.save_for_backward(q, k, v, *output, *([] if mask is None else [mask]))


_attention.register_autograd(
    lambda ctx, grad, _: (*_attention_backward(grad, *ctx.saved_tensors[:5]), None), setup_context=_save_attention
)


def _one_kernel_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # as torch does, in every call
        zeros = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device)
        attn_mask = zeros.masked_fill_(~attn_mask, float("-inf"))
    return _attention(q, k, v, attn_mask)[0]  # type: ignore[no-any-return]


class _OneKernel(torch.autograd.Function):
    """Keeps what a fused pass keeps: its inputs; of a sum and its norm the sum, and a number of rows a parameter."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *tensors: Tensor) -> Any:
        with _disable_current_modes():
            made = function(*tensors)
        ctx.shapes = [each.shape for each in tensors]
        if isinstance(made, Tensor):
            ctx.save_for_backward(*tensors)
            return made.clone()
        total, normed = torch._foreach_neg(made)  # an operation, whichever, with several results
        ctx.save_for_backward(total, total.new_empty(*total.shape[:-1], len(tensors) - 2, dtype=torch.float32))
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_neg([grad.new_empty(shape) for shape in ctx.shapes])


def one_kernel(function: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
    """Stands in for `fused`."""
    return partial(_OneKernel.apply, partial(function, *constants))


def _no_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return why_not_flash(torch.device("cuda"), dtype, head_dim)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Shows fused attention, FlexAttention and RMSNorm as one operation each, and chooses kernels as on CUDA."""
    with (
        patch.object(attention, "why_not_flash", _no_flash),
        patch.object(attention, "why_not_flex", lambda device, head_dim: None),
        patch.object(attention, "attend_capped", lambda q, k, v, *_, **options: _attention(q, k, v, None)[0]),
        patch.object(attention_inputs, "made_block_mask", lambda *_: None),
        patch.object(F, "scaled_dot_product_attention", _one_kernel_attention),
        patch.object(F, "rms_norm", lambda x, shape, weight, eps: _rms_norm(x, weight)[0]),
    ):
        yield
