"""Linear layers and embedding cut over tensor-parallel ranks.

In: hidden states `[batch, seq, hidden]` (`[batch, seq/tp, hidden]` under sequence parallelism). Out: column-cut
features `[batch, seq, features/tp]`, or hidden states again. Weights are Hugging Face's `[out, in]`; every parameter
carries its `Shard`. At size one each layer is the plain torch layer.

In backward the gradient of the input comes first, and its sum over the ranks travels beside the weight's gradient. Of a
cut sequence a rank keeps its slice, and gathers the whole once more beside the input's gradient (Korthikanti 2022,
section 4.2.2). For a weight that is not trained no input is kept or gathered again, and no product made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import (
    TensorParallel,
    begin_all_gather,
    begin_sum,
    joined_slices,
    stacked_slices,
    sum_of_stacked,
)
from megalite.parallel.gradient_accumulation_fusion import SumsGradients, leaves_autograd, sum_in_place
from megalite.parallel.shard import Initializer, Shard

ONE_RANK = TensorParallel()
Put = Callable[[nn.Parameter, Tensor, Tensor], None]  # `deferred_weight_gradients.WeightGradientQueue.put`


def sharded_parameter(shard: Shard) -> nn.Parameter:
    """Returns an uninitialised parameter of the shard's local shape that carries its `Shard`."""
    parameter = nn.Parameter(torch.empty(shard.local_shape))
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def replicated_weight(
    shape: tuple[int, ...],
    tp: TensorParallel,
    initializer: Initializer,
    sections: tuple[tuple[str, int], ...] | None = None,
) -> nn.Parameter:
    """Returns a parameter that every tensor-parallel rank holds whole and uses on its slice of the sequence, if that is
    cut: the engine sums its gradients over these ranks once a step. `sections` as in `Shard`."""
    parameter = sharded_parameter(Shard(shape, None, sections or (("", shape[0]),), tp.size, tp.rank, initializer))
    parameter.is_summed_at_step = tp.sequence_is_cut  # type: ignore[attr-defined]
    return parameter


def lacks_fast_gemm(x: Tensor) -> bool:
    """True for 16-bit numbers on a CPU without units for them: oneDNN emulates bf16 at a quarter of fp32's speed, and
    torch multiplies fp16 one number at a time, at a thirtieth.

    Such tensors are widened to fp32 around a GEMM, which loses nothing: a 16-bit GEMM sums in fp32 too.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not (_cpu_multiplies_bf16() if x.dtype == torch.bfloat16 else _cpu_multiplies_fp16())


def _cpu_multiplies_bf16() -> bool:
    cpu = torch.cpu.get_capabilities()
    return cpu["architecture"] != "x86_64" or cpu["amx_bf16"] or cpu["avx512_bf16"]


def _cpu_multiplies_fp16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def why_fp16_is_slow() -> str | None:
    """Returns what computing in fp16 on this CPU costs, in a sentence; None if it has units for it."""
    if _cpu_multiplies_fp16():
        return None
    return (
        "precision.dtype fp16: this CPU has no units for it, so products are computed in fp32 and rounded to fp16, "
        "which takes longer than fp32: good for a test of what a GPU is to do"
    )


def multipliable(x: Tensor) -> Tensor:
    """Widens 16-bit numbers to fp32 on a CPU without units for them."""
    return x.float() if lacks_fast_gemm(x) else x


class Recomputable(NamedTuple):
    """The input of a product, which backward computes again by `function(*kept)`, to the bit, instead of keeping it.

    A named tuple, because ZeRO-3's hooks search tuples, but not dataclasses, for tensors.
    """

    value: Tensor
    function: Callable[..., Tensor]  # pointwise: it costs a pass through memory, and no product
    kept: tuple[Tensor, ...]  # without gradients; what other functions keep anyway, and small copies


Adapter = Callable[[Tensor | Recomputable, Tensor, Tensor, Tensor], Tensor]  # `adapters.LowRankAdapter`


class _Product(torch.autograd.Function):
    """`x W^T + b` with backward in our order: the input's gradient, its sum over the ranks, the weight's gradient.

    `tp`: the product enters the parallel region. Of a cut sequence x is this rank's slice `[batch, seq/tp, in]`, and y
    is `[tp * batch, seq/tp, out]`, in the order of `stacked_slices`. `put` takes the operands of the weight's gradient
    `[tokens, out]`, `[tokens, in]` in autograd's place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        put: Callable[[Tensor, Tensor], None] | None,
        tp: TensorParallel,
        function: Callable[..., Tensor] | None,
        *kept: Tensor,
    ) -> Tensor:
        ctx.keeps_input = weight.requires_grad
        ctx.save_for_backward(weight, *((x,) if ctx.keeps_input and function is None else kept))
        ctx.put, ctx.tp, ctx.function = put, tp, function
        whole = begin_all_gather(x, tp).wait() if tp.sequence_is_cut else x
        rows = whole.flatten(0, -2)  # folded as `F.linear` folds it
        y = F.linear(multipliable(rows), multipliable(weight), None if bias is None else multipliable(bias))
        # detached: autograd forbids to change a Function's output in place if it is a view, as residuals do
        return y.to(x.dtype).view(*whole.shape[:-1], y.shape[-1]).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        tp, gathering, input_again = ctx.tp, None, ctx.function or Tensor.detach
        if ctx.keeps_input and tp.sequence_is_cut:
            gathering = begin_all_gather(input_again(*kept), tp)
        rows = grad.flatten(0, -2)  # [tokens, out]
        wide = multipliable(rows)
        x_grad, summing = None, None
        if ctx.needs_input_grad[0]:
            x_grad = wide @ multipliable(weight)
            x_grad = x_grad.to(grad.dtype).view(*grad.shape[:-1], x_grad.shape[-1])
            summing = begin_sum(x_grad, tp) if tp.size > 1 else None
        weight_grad = None
        if ctx.keeps_input:
            x = input_again(*kept) if gathering is None else gathering.wait()
            if ctx.put is not None:
                # detached: x, and so a view of it, would keep the graph that it comes from
                ctx.put(rows.detach(), x.detach().flatten(0, -2))
            else:
                weight_grad = (wide.t() @ multipliable(x.flatten(0, -2))).to(weight.dtype)
        bias_grad = wide.sum(0).to(grad.dtype) if ctx.needs_input_grad[2] else None
        x_grad = x_grad if summing is None else summing.wait()
        return x_grad, weight_grad, bias_grad, None, None, None, *(None for _ in kept if ctx.function is not None)


def linear(
    x: Tensor | Recomputable, weight: Tensor, bias: Tensor | None, tp: TensorParallel = ONE_RANK, put: Put | None = None
) -> Tensor:
    """Computes `F.linear`, through fp32 where 16-bit GEMMs are slow; `tp` as in `_Product`.

    With `put` the weight's gradient is put off, unless x needs none: nobody would wait for it then.
    """
    value, function, kept = x if isinstance(x, Recomputable) else (x, None, ())
    if not weight.requires_grad:  # backward does not need the input again
        function, kept = None, ()
    take: Callable[[Tensor, Tensor], None] | None = None
    if isinstance(weight, nn.Parameter) and leaves_autograd(weight):
        sums: SumsGradients | None = getattr(weight, "gradient_sums", None)
        if put is not None and value.requires_grad:
            take = partial(put, weight)  # recomputation saves another tensor
        elif sums is not None and sums.takes_products:
            take = partial(sums.add_product, weight)
    if take is None and function is None and tp.size == 1 and not lacks_fast_gemm(value):
        return F.linear(value, weight, bias)
    return _Product.apply(value, weight, bias, take, tp, function, *kept)


class LinearLayer(nn.Module):
    """A layer whose weight `[out, in]` is an operand of one GEMM, of which the weight gradient may be put off."""

    weight: nn.Parameter
    product: Callable[..., Tensor] = staticmethod(linear)  # with linear's arguments up to `tp`
    adapter: Adapter | None = None  # with the two factors as parameters of the layer
    lora_A: nn.Parameter  # peft's names, which end those in checkpoints
    lora_B: nn.Parameter

    def adapted(self, x: Tensor | Recomputable, y: Tensor) -> Tensor:
        """Adds what the adapter makes of x, if there is one, to the product y."""
        return y if self.adapter is None else self.adapter(x, y, self.lora_A, self.lora_B)


class ColumnParallelLinear(LinearLayer):
    """`y = x W^T + b` with the rows of W cut over the ranks; several projections share one GEMM as `sections`."""

    def __init__(self, in_features: int, sections: Mapping[str, int], bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        out, cut = sum(sections.values()), tuple(sections.items())
        self.weight = sharded_parameter(Shard((out, in_features), 0, cut, tp.size, tp.rank))
        self.bias = sharded_parameter(Shard((out,), 0, cut, tp.size, tp.rank, "zeros")) if bias else None

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """`[batch, seq(/tp), in]` -> `[batch, seq, out/tp]`."""
        y = self.product(x, self.weight, self.bias, self.tp)
        return joined_slices(self.adapted(x, y), self.tp)


class RowParallelLinear(LinearLayer):
    """`y = x W^T + b` with the columns of W cut over the ranks; the bias is added once, after the sum."""

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        cut = (("", in_features),)
        self.weight = sharded_parameter(Shard((out_features, in_features), 1, cut, tp.size, tp.rank))
        self.bias = replicated_weight((out_features,), tp, "zeros") if bias else None

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """`[batch, seq, in/tp]` -> `[batch, seq(/tp), out]`."""
        if self.tp.size == 1:
            return self.adapted(x, self.product(x, self.weight, self.bias))
        x = _with_stacked_slices(x, self.tp)
        y = sum_of_stacked(self.adapted(x, self.product(x, self.weight, None)), self.tp)
        return y if self.bias is None else y + self.bias


def _with_stacked_slices(x: Tensor | Recomputable, tp: TensorParallel) -> Tensor | Recomputable:
    """Brings x into the order of `stacked_slices`; where that takes a copy, x is kept and not the copy."""
    if not tp.sequence_is_cut:
        return x
    if not isinstance(x, Recomputable):
        stacked = stacked_slices(x, tp)
        return stacked if len(x) == 1 else Recomputable(stacked, partial(stacked_slices, tp=tp), (x.detach(),))
    function = x.function
    return x._replace(value=stacked_slices(x.value, tp), function=lambda *kept: stacked_slices(function(*kept), tp))


class _SummedRows(torch.autograd.Function):
    """`F.embedding` whose backward adds the tokens' rows to the weight's sum: no gradient of its size is made."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, total: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.total = total
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        # in a fixed order on CUDA too, unlike `index_add_`
        ctx.total().index_put_(ctx.saved_tensors, grad.float(), accumulate=True)
        return None, None, None


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
            return self._looked_up(tokens)
        rows = self.weight.shard.local_shape[0]  # type: ignore[attr-defined]
        local = stacked_slices(tokens, self.tp) - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = self._looked_up(local.masked_fill(elsewhere, 0))
        return sum_of_stacked(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)

    def _looked_up(self, rows: Tensor) -> Tensor:
        total = sum_in_place(self.weight)
        return F.embedding(rows, self.weight) if total is None else _SummedRows.apply(rows, self.weight, total)
