"""The gradients of single micro-batches as backward computes them, against their mean as the optimizer gets it.

In: an engine during one step. Out: per parameter the error of each entry of the mean, relative to the mean of its
terms' absolute values. Between the two there are only sums of known numbers: over micro-batches, replicas, and the
stages of a tied weight. `launch.parity.comparison.reduction_bound` is what their rounding can amount to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.engine import Engine
from megalite.engine.parameter_state import loss_scale
from megalite.engine.stages import TORCH_DTYPES


class MicroBatchGradients:
    """Sums in float64 of this rank's micro-batch gradients and of their absolute values, per parameter."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sums: dict[Tensor, Tensor] = {}  # [2, *local shape]
        self._calls: Counter[Tensor] = Counter()
        self._tied = engine.tied_weight  # each of its two ranks adds up its own part
        # below the smallest normal number of a format, rounding errors stop falling with the number
        precision = engine.config.precision
        formats = precision.gradient_accumulation_dtype, precision.reduction_dtype
        self._smallest = max(torch.finfo(TORCH_DTYPES[each]).tiny for each in formats)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Adds up what the reducer gets within the `with`. A hook would have a weight's gradient put off no more."""
        assert not self._calls, "one step is watched"
        reducer, head = self._engine.reducer, None if self._tied is None else self._tied.weight
        add, former = reducer.add, (reducer.takes_products, reducer.is_fp32)

        def added(parameter: nn.Parameter, gradient: Tensor) -> None:
            self._add(parameter, gradient)
            add(parameter, gradient)

        reducer.add = added  # type: ignore[method-assign]
        reducer.takes_products = reducer.is_fp32 = False  # each gradient apart
        with ExitStack() as undo:
            if head is not None and not isinstance(head, nn.Parameter):  # of which the reducer gets the sum
                undo.callback(head.register_hook(partial(self._add, head)).remove)
            try:
                yield
            finally:
                reducer.add, (reducer.takes_products, reducer.is_fp32) = add, former  # type: ignore[method-assign]

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        self._calls[parameter] += 1
        is_tied = self._tied is not None and self._tied.weight is parameter
        if is_tied and self._calls[parameter] > self._engine.micro_batches:
            return  # the sum of the head's, whose terms its own rank has added up
        wide = gradient.detach().double()
        both = torch.stack((wide, wide.abs()))
        self._sums[parameter] = self._sums[parameter].add_(both) if parameter in self._sums else both

    def errors(self, parameter: nn.Parameter, mean: Tensor) -> Tensor:
        """Returns the error of each entry of `mean`, the optimizer's gradient; collective over the replicas, and over
        the tensor-parallel ranks where each has a part."""
        self._unite_tied()
        both = self._both(parameter)
        if getattr(parameter, "is_summed_at_step", False):
            dist.all_reduce(both, group=self._engine.tensor_parallel_group())
        dist.all_reduce(both, group=self._engine.replicas_of(parameter))
        scale = loss_scale(self._engine)
        total, size = both / (self._engine.mesh.replicas * scale)
        return ((mean.double() - total).abs() / (size + self._smallest / scale)).nan_to_num(nan=torch.inf)

    def _both(self, weight: Tensor) -> Tensor:
        if weight in self._sums:
            return self._sums[weight]
        return torch.zeros((2, *weight.shape), dtype=torch.float64, device=weight.device)  # no token came by

    def _unite_tied(self) -> None:
        """Adds the part of the head's rank to the embedding's, before the first use of either."""
        if self._tied is None:
            return
        tied, self._tied = self._tied, None
        weight, group, (embedding, head) = tied.weight, tied.group, tied.ranks
        if not isinstance(weight, nn.Parameter):
            dist.send(self._both(weight), dst=embedding, group=group)
            return
        part = torch.empty((2, *weight.shape), dtype=torch.float64, device=weight.device)
        dist.recv(part, src=head, group=group)
        self._sums[weight] = self._both(weight) + part
