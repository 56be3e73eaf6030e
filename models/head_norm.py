"""Norms of queries and keys, whose heads are cut over the tensor-parallel ranks.

In and out: this rank's heads `[batch, seq, heads/tp, head_dim]`, or its features of all of them side by side
`[batch, seq, heads * head_dim / tp]`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel, all_reduce
from megalite.parallel.linear import sharded_parameter
from megalite.parallel.norm import NORMS
from megalite.parallel.shard import Shard


def norm_of_each_head(model: ModelConfig, tp: TensorParallel) -> nn.Module:
    """A norm over head_dim, its weight replicated.

    A rank sees its own heads only, as of a cut sequence it sees its own tokens only: the weight's gradient is summed
    over the ranks alike.
    """
    cut = dataclasses.replace(tp, sequence_parallel=True)
    return NORMS[model.normalization](model.head_dim, model.rms_norm_eps, cut)


class FullWidthRMSNorm(nn.Module):
    """`x / rms(x) * weight` with the root mean square of all heads together (OLMo-2), features and weight cut."""

    def __init__(self, features: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.features, self.eps, self.tp = features, eps, tp
        self.weight = sharded_parameter(Shard((features,), 0, (("", features),), tp.size, tp.rank, "ones"))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, features/tp]` -> the same."""
        return _FullWidthRMSNorm.apply(x, self.weight, self.eps, self.features, self.tp)


class _FullWidthRMSNorm(torch.autograd.Function):
    """Computed in fp32 at least; keeps its input and one number per token. Ranks exchange one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, features: int, tp: TensorParallel) -> Tensor:
        wide = _widened(x)
        square_sum = all_reduce(wide.square().sum(-1, keepdim=True), tp)
        inverse_rms = square_sum.div_(features).add_(eps).rsqrt_()  # [batch, seq, 1]
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.features, ctx.tp = features, tp
        return (wide * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        wide_x, wide_grad = _widened(x), _widened(grad)
        product = wide_grad * wide_x
        weight_grad = (product * inverse_rms).sum((0, 1))
        # d/dx of x r(x) w, with r = 1 / rms(x):  r (g w - x r^2 <g w, x> / features)
        along_x = all_reduce((product @ _widened(weight)).unsqueeze(-1), ctx.tp)
        along_x.mul_(inverse_rms.square()).div_(-ctx.features)
        x_grad = torch.mul(wide_grad, weight, out=product).addcmul_(wide_x, along_x).mul_(inverse_rms)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None, None, None


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x
