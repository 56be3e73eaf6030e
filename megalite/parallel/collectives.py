"""Tensor-parallel communication with its gradient: the four conjugate pairs of Megatron-LM.

In and out: local tensors, hidden states `[batch, seq, hidden]`; under sequence parallelism `[batch, seq/tp, hidden]`
between the parallel parts. Every function is the identity at size one (Shoeybi 2019, section 3; Korthikanti 2022,
section 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional  # those that a compiled block is made of
from torch import Tensor

from megalite.config.sections import ContextParallelKind

# torch 2.13 renamed both and warns about the old names
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

REDUCTION_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max"}


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share the work of layers, and this one's place among them."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ContextParallel(RankGroup):
    """The ranks that share sequences: each has the same part of them in all layers (`megalite.parallel.context`)."""

    kind: ContextParallelKind = "all_gather"


@dataclass(frozen=True)
class TensorParallel(RankGroup):
    """The tensor-parallel group that a layer is cut over, and the group that its sequences are cut over."""

    sequence_parallel: bool = False
    context: ContextParallel = ContextParallel()
    experts: RankGroup = RankGroup()  # the replicas that have a layer's experts between them

    @property
    def sequence_is_cut(self) -> bool:
        """True if hidden states between the parallel parts hold only this rank's slice of the sequence."""
        return self.sequence_parallel and self.size > 1

    @property
    def sequence_parts(self) -> int:
        """Parts that a sequence is cut into between the parallel parts."""
        return self.context.size * (self.size if self.sequence_is_cut else 1)


class Begun(NamedTuple):
    """A collective that computation goes on beside; `tensor` is its result from `wait` on."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Returns the result; on CUDA the current stream waits for it, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def begin_all_gather(x: Tensor, tp: RankGroup) -> Begun:
    """Begins to stack the ranks' tensors along the first dim: `[rows, ...]` -> `[tp * rows, ...]`. No gradient."""
    if torch.compiler.is_compiling():
        assert tp.group is not None
        return Begun(functional.all_gather_tensor(x.contiguous(), 0, tp.group), None)
    gathered = x.new_empty((tp.size * x.shape[0], *x.shape[1:]))
    work = getattr(dist, ALL_GATHER)(gathered, x.contiguous(), group=tp.group, async_op=True)
    return Begun(gathered, work)


def begin_sum(x: Tensor, tp: TensorParallel) -> Begun:
    """Begins to sum `x`, a buffer that nobody else reads, over the ranks. No gradient.

    On a cut sequence slices are stacked, `[tp * batch, seq/tp, hidden]`, and the result is this rank's; else `x` is
    summed in place.
    """
    if torch.compiler.is_compiling():
        return Begun(reduce_scatter(x, tp, 0) if tp.sequence_is_cut else all_reduce(x, tp), None)
    if not tp.sequence_is_cut:
        return Begun(x, dist.all_reduce(x, group=tp.group, async_op=True))
    mine = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    return Begun(mine, getattr(dist, REDUCE_SCATTER)(mine, x, group=tp.group, async_op=True))


def all_reduce(x: Tensor, tp: RankGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces over the group, in place where `x` is contiguous. No gradient."""
    if tp.size == 1:
        return x
    x = x.contiguous()
    if torch.compiler.is_compiling():
        assert tp.group is not None
        return functional.all_reduce(x, REDUCTION_NAMES[op], tp.group)
    dist.all_reduce(x, op=op, group=tp.group)
    return x


def all_gather(x: Tensor, tp: RankGroup, dim: int) -> Tensor:
    """Concatenates the ranks' tensors along `dim`. No gradient."""
    return x if tp.size == 1 else _unstacked(begin_all_gather(x, tp).wait(), tp.size, dim)


def reduce_scatter(x: Tensor, tp: RankGroup, dim: int) -> Tensor:
    """Sums over the ranks and keeps this rank's slice of `dim`. No gradient."""
    if tp.size == 1:
        return x
    if torch.compiler.is_compiling():
        assert tp.group is not None
        return functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, tp.group)
    pieces = _stacked(x, tp.size, dim).contiguous()
    mine = pieces.new_empty((pieces.shape[0] // tp.size, *pieces.shape[1:]))
    getattr(dist, REDUCE_SCATTER)(mine, pieces, group=tp.group)
    return mine


def _stacked(x: Tensor, count: int, dim: int) -> Tensor:
    """Stacks `count` equal slices of `dim` along the first dim; a view where all dims before `dim` are of size one."""
    if dim == 0:
        return x
    return x.unflatten(dim, (count, -1)).movedim(dim % x.ndim, 0).flatten(0, 1)


def _unstacked(x: Tensor, count: int, dim: int) -> Tensor:
    """Undoes `_stacked`."""
    if dim == 0:
        return x
    dim %= x.ndim
    return x.unflatten(0, (count, -1)).movedim(0, dim).flatten(dim, dim + 1)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.tp), None


class _CopyParameter(_Copy):
    """Sums the gradient in fp32 at least, and rounds the sum once: parameters are small here, and their gradients are
    what the optimizer gets."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        return all_reduce(wide, ctx.tp).to(grad.dtype), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        if torch.compiler.is_compiling():
            return all_reduce(x, tp)
        ctx.mark_dirty(x)  # the partial result of a GEMM, which nothing else reads: summed in place
        dist.all_reduce(x, group=tp.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
        ctx.tp, ctx.dim = tp, dim
        return all_gather(x, tp, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.tp, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return reduce_scatter(x, tp, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.tp, 0), None


SEQUENCE_DIM = 1


def stacked_slices(x: Tensor, tp: TensorParallel) -> Tensor:
    """Stacks the ranks' slices of the sequence: `[batch, seq, ...]` -> `[tp * batch, seq/tp, ...]`.

    Collectives of a cut sequence work in this order, and products take their rows in any order. So what is brought
    into it is not hidden states but features, of which a rank has a part only: one copy, and none of one sequence.
    """
    return _stacked(x, tp.size, SEQUENCE_DIM) if tp.sequence_is_cut else x


def joined_slices(x: Tensor, tp: TensorParallel) -> Tensor:
    """Undoes `stacked_slices`: `[tp * batch, seq/tp, ...]` -> `[batch, seq, ...]`."""
    return _unstacked(x, tp.size, SEQUENCE_DIM) if tp.sequence_is_cut else x


def enter_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enters a column-cut part: the whole sequence forward, the sum of the ranks' gradients backward."""
    if tp.size == 1:
        return x
    return _Gather.apply(x, tp, SEQUENCE_DIM) if tp.sequence_is_cut else _Copy.apply(x, tp)


def gathered_slices(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enters a column-cut part as `enter_parallel_region` does, in the order of `stacked_slices`."""
    return _Gather.apply(x, tp, 0) if tp.sequence_is_cut else enter_parallel_region(x, tp)


def leave_parallel_region(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leaves a row-cut part: sums the ranks' partial results (for this rank's slice of the sequence)."""
    return sum_of_stacked(stacked_slices(x, tp), tp)


def sum_of_stacked(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leaves a row-cut part with what is in the order of `stacked_slices`: returns `[batch, seq(/tp), hidden]`."""
    if tp.size == 1:
        return x
    return _ReduceScatter.apply(x, tp) if tp.sequence_is_cut else _Reduce.apply(x, tp)


def gather_heads(x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
    """Gathers all ranks' slices of key/value features; backward sums the contributions of each rank's queries."""
    return x if tp.size == 1 else _Gather.apply(x, tp, dim)


def parameter_in_parallel_region(parameter: Tensor, tp: TensorParallel) -> Tensor:
    """Marks a replicated parameter used inside a parallel part, on this rank's heads or features: its gradient is
    summed over the ranks' parts, whether or not the sequence is cut outside."""
    return parameter if tp.size == 1 else _CopyParameter.apply(parameter, tp)
