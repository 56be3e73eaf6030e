"""Passes between products, of the loss and of blocks that are not compiled. On a GPU torch's compiler makes one kernel
of each, and one of its gradient, for which a pointwise pass keeps its inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

_JOINING = set[Callable[..., Any]]()


def joining(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Marks a pass that joins parts to one tensor, for which inductor may choose a kernel each: it gets one."""
    _JOINING.add(function)
    return function


@lru_cache(maxsize=64)  # layers share what is compiled
def fused(function: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
    """Returns `function(*constants, ...)` of tensors `[..., features]`, compiled when it is first called. One graph
    serves all sizes but that of the features, so that no shape of a micro-batch compiles anew."""
    compiled = torch.compile(function, options={"force_pointwise_cat": True} if function in _JOINING else None)

    def in_one_pass(*tensors: Tensor) -> Any:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, tuple(range(tensor.ndim - 1)))
        return compiled(*constants, *tensors)

    return in_one_pass


class HasPasses(nn.Module):
    """A part of a block with passes between products."""

    run: Callable[..., Callable[..., Any]] = partial  # `fused` where `megalite.engine.compilation` says so
    is_fusible = True


def sum_and_norm(
    normalize: Callable[..., Tensor], eps: float, x: Tensor, residual: Tensor, *parameters: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `x + residual` and its norm. A generated kernel may choose the order of a row's sum by timing, so what
    has to be the same bits on several ranks is not fused."""
    total = x + residual
    return total, normalize(eps, total, *parameters)
