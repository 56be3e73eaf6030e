"""RMSNorm, Gemma's zero-centred RMSNorm and LayerNorm over hidden states, whole or cut along the sequence.

In and out: `[batch, seq(/tp), hidden]`. The weights are replicated; on a cut sequence each rank sees only its
positions, so their gradients are summed over the tensor-parallel ranks here, where the cut is known.
`FullWidthRMSNorm` takes features that are cut themselves, `[batch, seq, features/tp]`, with its part of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import TensorParallel, all_reduce
from megalite.parallel.fused_passes import HasPasses, sum_and_norm
from megalite.parallel.linear import ONE_RANK, Recomputable, replicated_weight, sharded_parameter
from megalite.parallel.shard import Initializer, Shard


class ReplicatedNorm(HasPasses):
    """A norm whose parameters every tensor-parallel rank holds whole."""

    normalize: Callable[..., Tensor]  # of eps, x and the parameters, in the order of `parameters()`
    initial_weight: Initializer = "ones"
    has_kernel = True  # of torch's on a GPU, without a sum

    def __init__(self, hidden_size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.eps = tp, eps
        self.is_fusible = tp.size == 1 or tp.sequence_is_cut  # ranks with the same hidden states need the same bits
        self.weight = replicated_weight((hidden_size,), tp, self.initial_weight)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, is_kept: bool = True) -> Any:
        """`[batch, seq(/tp), hidden]` -> the same; with `is_kept=False` together with the way to compute it again, for
        a product, which then does not keep it. With a residual: the sum of both, and its norm."""
        parameters = list(self.parameters())
        if residual is not None:
            return self.run(sum_and_norm, self.normalize, self.eps)(x, residual, *parameters)
        if is_kept:
            return (partial if self.has_kernel else self.run)(self.normalize, self.eps)(x, *parameters)
        normalize = partial(self.normalize, self.eps)
        # copies: when backward comes to the product, ZeRO-3 has not gathered this layer's parameters yet
        return Recomputable(
            normalize(x, *parameters), normalize, (x.detach(), *(p.detach().clone() for p in parameters))
        )


class RMSNorm(ReplicatedNorm):
    """`x / rms(x) * weight` (Zhang & Sennrich 2019)."""

    @staticmethod
    def normalize(eps: float, x: Tensor, weight: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.compiler.is_compiling():  # torch takes eleven passes there, we six
            return _RMSNorm.apply(x, weight, eps, 0.0, x.shape[-1])
        return F.rms_norm(x, (x.shape[-1],), weight, eps)


class ZeroCenteredRMSNorm(ReplicatedNorm):
    """`x / rms(x) * (1 + weight)`, as in Gemma: weight decay pulls the factor to one.

    As in transformers, the weight is widened before one is added, and rounding happens once, after the product.
    """

    initial_weight = "zeros"
    has_kernel = False

    @staticmethod
    def normalize(eps: float, x: Tensor, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return F.rms_norm(_widened(x), (x.shape[-1],), _factor(weight, 1.0), eps).to(x.dtype)
        return _RMSNorm.apply(x, weight, eps, 1.0, x.shape[-1])


class FullWidthRMSNorm(nn.Module):
    """`x / rms(x) * weight` of features cut over the ranks, with the root mean square of all of them (OLMo-2 normalizes
    all query heads together). Ranks exchange one number per token."""

    def __init__(self, features: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.features, self.eps, self.tp = features, eps, tp
        self.weight = sharded_parameter(Shard((features,), 0, (("", features),), tp.size, tp.rank, "ones"))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, features/tp]` -> the same."""
        return _RMSNorm.apply(x, self.weight, self.eps, 0.0, self.features, self.tp)


class _RMSNorm(torch.autograd.Function):
    """`x / rms(x) * (center + weight)` in fp32 at least; keeps its input and one number per token.

    `size` features, which may be cut over the ranks of `cut`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, center: float, size: int, cut: TensorParallel = ONE_RANK
    ) -> Tensor:
        wide = _widened(x)
        square_sum = all_reduce(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_(), cut)
        inverse_rms = square_sum.div_(size).add_(eps).rsqrt_()  # [batch, seq(/tp), 1]
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.center, ctx.size, ctx.cut = center, size, cut
        return (wide * inverse_rms).mul_(_factor(weight, center)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        wide_x, wide_grad = (_widened(tensor).reshape(-1, x.shape[-1]) for tensor in (x, grad))
        factor, inverse_rms = _factor(weight, ctx.center), inverse_rms.reshape(-1, 1)
        product = wide_grad * wide_x
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = (inverse_rms.t() @ product).view_as(weight).to(weight.dtype)
        # d/dx of x r(x) w, with r = 1 / rms(x):  r (g w - x r^2 <g w, x> / size)
        along_x = all_reduce((product @ factor).unsqueeze(1), ctx.cut).mul_(inverse_rms.square()).div_(-ctx.size)
        x_grad = torch.mul(wide_grad, factor, out=product).addcmul_(wide_x, along_x).mul_(inverse_rms)
        return x_grad.view_as(x).to(x.dtype), weight_grad, None, None, None, None


def _factor(weight: Tensor, center: float) -> Tensor:
    return _widened(weight) + center if center else _widened(weight)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


class LayerNorm(ReplicatedNorm):
    """`(x - mean) / std * weight + bias` (Ba 2016)."""

    def __init__(self, hidden_size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__(hidden_size, eps, tp)
        self.bias = replicated_weight((hidden_size,), tp, "zeros")

    @staticmethod
    def normalize(eps: float, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


# by `model.normalization`
NORMS = {"rmsnorm": RMSNorm, "zero_centered_rmsnorm": ZeroCenteredRMSNorm, "layernorm": LayerNorm}
