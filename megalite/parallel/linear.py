"""Linear layers and embedding cut over tensor-parallel ranks.

In: hidden states `[batch, seq, hidden]` (`[batch, seq/tp, hidden]` under sequence parallelism). Out: column-cut
features `[batch, seq, features/tp]`, or hidden states again. Weights are Hugging Face's `[out, in]`; every parameter
carries its `Shard`. At size one each layer is the plain torch layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import (
    TensorParallel,
    enter_parallel_region,
    leave_parallel_region,
    replicated_parameter,
)
from megalite.parallel.shard import Initializer, Shard, replicated


def sharded_parameter(shard: Shard) -> nn.Parameter:
    """Returns an uninitialised parameter of the shard's local shape that carries its `Shard`."""
    parameter = nn.Parameter(torch.empty(shard.local_shape))
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def replicated_weight(size: int, tp: TensorParallel, initializer: Initializer) -> nn.Parameter:
    """Returns a vector that every tensor-parallel rank holds whole."""
    return sharded_parameter(replicated((size,), tp.size, tp.rank, initializer))


def lacks_fast_gemm(x: Tensor) -> bool:
    """True for bf16 on an x86 CPU without bf16 units: oneDNN emulates them at a quarter of fp32's speed.

    Such tensors are widened to fp32 around a GEMM, which loses nothing: a bf16 GEMM sums in fp32 too.
    """
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and not _cpu_multiplies_bf16()


def _cpu_multiplies_bf16() -> bool:
    cpu = torch.cpu.get_capabilities()
    return cpu["architecture"] != "x86_64" or cpu["amx_bf16"] or cpu["avx512_bf16"]


def multipliable(x: Tensor) -> Tensor:
    """Widens bf16 to fp32 on a CPU without bf16 units."""
    return x.float() if lacks_fast_gemm(x) else x


class _WidenedLinear(torch.autograd.Function):
    """`F.linear` of bf16 tensors by fp32 GEMMs; only the bf16 tensors are kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2).float()  # [batch * seq, out]
        x_grad = (rows @ weight.float()).to(x.dtype).view_as(x)
        weight_grad = (rows.t() @ x.flatten(0, -2).float()).to(weight.dtype)
        return x_grad, weight_grad, rows.sum(0).to(weight.dtype) if ctx.has_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `F.linear`, through fp32 where bf16 GEMMs are slow."""
    return _WidenedLinear.apply(x, weight, bias) if lacks_fast_gemm(x) else F.linear(x, weight, bias)


class LinearLayer(nn.Module):
    """A layer whose weight `[out, in]` is an operand of one GEMM, whose gradient weight_gradients.py may put off."""

    weight: nn.Parameter
    product: Callable[[Tensor, nn.Parameter, Tensor | None], Tensor] = staticmethod(linear)


class ColumnParallelLinear(LinearLayer):
    """`y = x W^T + b` with the rows of W cut over the ranks; several projections share one GEMM as `sections`."""

    def __init__(self, in_features: int, sections: Mapping[str, int], bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        out, cut = sum(sections.values()), tuple(sections.items())
        self.weight = sharded_parameter(Shard((out, in_features), 0, cut, tp.size, tp.rank))
        self.bias = sharded_parameter(Shard((out,), 0, cut, tp.size, tp.rank, "zeros")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq(/tp), in]` -> `[batch, seq, out/tp]`."""
        return self.product(enter_parallel_region(x, self.tp), self.weight, self.bias)


class RowParallelLinear(LinearLayer):
    """`y = x W^T + b` with the columns of W cut over the ranks; the bias is added once, after the sum."""

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        cut = (("", in_features),)
        self.weight = sharded_parameter(Shard((out_features, in_features), 1, cut, tp.size, tp.rank))
        self.bias = replicated_weight(out_features, tp, "zeros") if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, in/tp]` -> `[batch, seq(/tp), out]`."""
        if self.tp.size == 1:
            return self.product(x, self.weight, self.bias)
        y = leave_parallel_region(self.product(x, self.weight, None), self.tp)
        return y if self.bias is None else y + replicated_parameter(self.bias, self.tp)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary cut over the ranks and padded to a multiple of them.

    The same weight serves a tied output head: see `megalite.parallel.loss`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.weight = sharded_parameter(Shard((vocab_size, hidden_size), 0, (("", vocab_size),), tp.size, tp.rank))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids `[batch, seq]` -> `[batch, seq(/tp), hidden]`."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shard.local_shape[0]  # type: ignore[attr-defined]
        local = tokens - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return leave_parallel_region(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)
