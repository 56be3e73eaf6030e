"""Linear layers of many experts in one: each has rows of its own, and all weights are one parameter.

In: rows `[rows, in]`, those of an expert next to each other, and how many each has (`RowGroups`). Out: `[rows, out]`,
local features. Weights are a stack `[experts, out, in]`. On a GPU all products are one kernel, and how many rows an
expert has stays on the device; elsewhere a loop over the experts computes the same, and the host must know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.gradient_accumulation_fusion import leaves_autograd
from megalite.parallel.linear import multipliable, sharded_parameter
from megalite.parallel.shard import Shard

log = logging.getLogger(__name__)

ALIGNMENT = 16  # bytes: torch's grouped kernel reads rows that begin at multiples of it


@dataclass(frozen=True)
class RowGroups:
    """The rows of each expert: expert e has those from `ends[e - 1]` to `ends[e]`."""

    ends: Tensor  # [experts] int32, on the device
    counts: list[int] | None  # the same for loops on the host; None: one kernel reads `ends`

    @classmethod
    def of(cls, ends: Tensor, *, is_one_kernel: bool) -> RowGroups:
        """Takes where the experts' rows end; without the kernel it waits for the device."""
        return cls(ends, None if is_one_kernel else ends.diff(prepend=ends.new_zeros(1)).tolist())

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields each expert's rows of every tensor."""
        assert self.counts is not None
        yield from zip(*(tensor.split(self.counts) for tensor in tensors), strict=True)


def why_no_grouped_kernel(x: Tensor, shapes: list[tuple[int, ...]]) -> str | None:
    """Returns why the products of `x` with stacks of weights of `shapes` cannot be one kernel, or None if they can."""
    if x.device.type == "cpu":
        return "a CPU has no kernel for them"
    if x.dtype != torch.bfloat16:
        return f"torch has a kernel for bf16, not for {str(x.dtype).removeprefix('torch.')}"
    if any(size * x.element_size() % ALIGNMENT for shape in shapes for size in shape[1:]):
        sizes = " and ".join(str(list(shape[1:])) for shape in shapes)
        return f"an expert's local weights {sizes} have sizes that are no multiples of {ALIGNMENT // x.element_size()}"
    return None


@lru_cache(maxsize=8)
def say_why_experts_loop(reason: str) -> None:
    """Logs once why a GPU computes experts one after the other, on rank 0 alone."""
    if dist.is_initialized() and dist.get_rank():
        return
    log.warning(f"experts are computed one after the other, for which the host waits in each layer: {reason}")


def grouped_product(rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
    """Multiplies each expert's rows `[rows, in]` with its matrix of `[experts, in, out]`."""
    if groups.counts is None:
        return F.grouped_mm(rows, matrices, offs=groups.ends)
    result = rows.new_empty(len(rows), matrices.shape[2])
    for matrix, (part, out) in zip(matrices, groups.parts(rows, result), strict=True):
        out.copy_(multipliable(part) @ multipliable(matrix))
    return result


def grouped_weight_gradient(grad: Tensor, rows: Tensor, groups: RowGroups) -> Tensor:
    """Computes `grad^T rows` of each expert: `[rows, out]`, `[rows, in]` -> `[experts, out, in]`, zero without rows."""
    if groups.counts is None:
        return F.grouped_mm(grad.t(), rows, offs=groups.ends)
    result = rows.new_empty(len(groups.counts), grad.shape[1], rows.shape[1])
    for out, (part, row) in zip(result, groups.parts(grad, rows), strict=True):
        out.copy_(multipliable(part).t() @ multipliable(row))
    return result


class _GroupedLinear(torch.autograd.Function):
    """Computes `rows weight^T` of each expert. Hand-written, because torch's own gradient refuses an expanded one, and
    because a CPU without bf16 units computes in fp32 and keeps bf16. `put` as in `linear._Product`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups, put: Callable[[Tensor, Tensor, RowGroups], None] | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.put = groups, put
        return grouped_product(x, weight.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        grad, weight_grad = grad.contiguous(), None
        if ctx.put is not None:
            ctx.put(grad.detach(), x.detach(), ctx.groups)
        elif ctx.needs_input_grad[1]:
            weight_grad = grouped_weight_gradient(grad, x, ctx.groups)
        return grouped_product(grad, weight, ctx.groups), weight_grad, None, None


def grouped_linear(
    x: Tensor,
    weight: nn.Parameter,
    groups: RowGroups,
    put: Callable[[nn.Parameter, Tensor, Tensor, RowGroups], None] | None = None,
) -> Tensor:
    """`[rows, in]` -> `[rows, out]`: each expert's rows times its own weight of `[experts, out, in]`. With `put` the
    weight's gradient is put off, as in `linear`."""
    take = None
    if put is not None and x.requires_grad and leaves_autograd(weight):
        take = partial(put, weight)
    return _GroupedLinear.apply(x, weight, groups, take)


class GroupedLinear(nn.Module):
    """`y = x W^T` with this rank's part of each expert's cut W and no communication: experts enter and leave the
    parallel region together. Its weight gradient may be put off like that of a `LinearLayer`."""

    weight: nn.Parameter
    product: Callable[[Tensor, nn.Parameter, RowGroups], Tensor] = staticmethod(grouped_linear)

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.local_shape = shard.local_shape  # ZeRO-3 holds the weight itself only while it is used
        self.weight = sharded_parameter(shard)

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """`[rows, in]` -> `[rows, out]`, both local sizes."""
        return self.product(x, self.weight, groups)
