"""The gradients of single micro-batches as backward computes them, against their mean as the optimizer gets it.

In: an engine during one step. Out: per parameter the error of each entry of the mean, relative to the mean of its
terms' absolute values. Between the two there are only sums of known numbers: over micro-batches, replicas, and the
stages of a tied weight. `launch.parity.comparison.reduction_bound` is what their rounding can amount to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.deepspeed_internals import tied_weights
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import loss_scale

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MicroBatchGradients:
    """Sums in float64 of this rank's micro-batch gradients and of their absolute values, per parameter."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sums: dict[nn.Parameter, Tensor] = {}  # [2, *local shape]
        self._tied = dict(tied_weights(engine.deepspeed.module))
        # below the smallest normal number of a format, rounding errors stop falling with the number
        precision = engine.config.precision
        formats = precision.gradient_accumulation_dtype, precision.reduction_dtype
        self._smallest = max(torch.finfo(TORCH_DTYPES[each]).tiny for each in formats)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Adds up what backward computes within the `with`."""
        handles = [each.register_hook(partial(self._add, each)) for _, each in self._engine.parameters()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        wide = gradient.detach().double()
        both = torch.stack((wide, wide.abs()))
        self._sums[parameter] = self._sums[parameter].add_(both) if parameter in self._sums else both

    def errors(self, parameter: nn.Parameter, mean: Tensor) -> Tensor:
        """Returns the error of each entry of `mean`, the optimizer's gradient; collective over the replicas."""
        shape = parameter.shard.local_shape  # type: ignore[attr-defined]
        nothing = partial(torch.zeros, (2, *shape), dtype=torch.float64, device=mean.device)  # no token came by
        both = (self._sums[parameter] if parameter in self._sums else nothing()).view(2, *shape)
        dist.all_reduce(both, group=self._engine.data_parallel_group())
        if parameter in self._tied:
            dist.all_reduce(both, group=self._tied[parameter])
        scale = loss_scale(self._engine)
        total, size = both / (self._engine.mesh.data_parallel_size * scale)
        return ((mean.double() - total).abs() / (size + self._smallest / scale)).nan_to_num(nan=torch.inf)
