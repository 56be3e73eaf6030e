"""Puts our reduction and step in the place of DeepSpeed's; and what is different under ZeRO-3.

ZeRO-3 cuts each parameter by itself, so a bucket's parts are put together for each replica before the collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import Config
from megalite.engine.compression.gradients import CompressedReducer, CompressedStep
from megalite.engine.deepspeed.internals import flat_groups, take_over_reduction
from megalite.engine.deepspeed.loss_scale import keep_loss_scale_on_device
from megalite.engine.deepspeed.zero_3 import begin_zero_3_step, end_zero_3_step, partitioned_groups, step_from_nvme
from megalite.engine.reduction.gradient_reduction import Bucket, BucketSlice, GradientReducer
from megalite.engine.reduction.partitioned_step import PartitionedStep
from megalite.engine.stages import TORCH_DTYPES
from megalite.engine.step_decision import StepDecision
from megalite.parallel.collectives import RankGroup, TensorParallel
from megalite.tracing.activity import Activity


class ShardedBucket(Bucket):
    """A bucket of ZeRO-3: each replica owns an equal part of each slice with the padding behind it."""

    @classmethod
    def of(
        cls, group: list[tuple[nn.Parameter, torch.Size, int]], dtype: torch.dtype, replicas: RankGroup
    ) -> ShardedBucket:
        """Returns the bucket of one of `partitioned_groups`."""
        slices, size = list[BucketSlice](), 0
        for parameter, shape, owned in group:
            slices.append(BucketSlice(parameter, size, shape))
            size += owned * replicas.size
        return cls(slices, size, dtype, replicas)

    def _owned(self) -> list[int]:
        starts = [*(one.start for one in self.slices), self.size]
        return [(following - start) // self.replicas.size for start, following in pairwise(starts)]

    def by_rank(self, sums: Tensor) -> Tensor:
        replicas = self.replicas.size
        lengths = [length * replicas for length in self._owned()]
        return torch.cat([piece.view(replicas, -1) for piece in sums.split(lengths)], dim=1).flatten()

    def own_parts(self) -> Iterator[tuple[BucketSlice, int, int, int]]:
        for one, length in zip(self.slices, self._owned(), strict=True):
            start = self.replicas.rank * length
            stop = min(start + length, one.shape.numel())
            if start < stop:
                yield one, start, stop, one.start // self.replicas.size


class ShardedStep(PartitionedStep):
    """Replaces that of ZeRO-3, whose weights are in pieces too."""

    @torch.no_grad()
    def __call__(self) -> None:
        begin_zero_3_step(self._optimizer)
        super().__call__()
        if not self._optimizer.overflow:
            end_zero_3_step(self._optimizer)

    def _update_on_host(self, partitions: list[Tensor], divisor: Tensor | None) -> None:
        if not self._optimizer.swap_optimizer:
            return super()._update_on_host(partitions, divisor)
        for number, gradient in enumerate(self.reducer.partitions):
            step_from_nvme(self._optimizer, number, gradient if divisor is None else gradient.div_(divisor))


def take_over_step(
    engine: Any,
    parameters: Iterable[nn.Parameter],
    config: Config,
    activity: Activity,
    tp: TensorParallel,
    decision: StepDecision,
) -> PartitionedStep:
    """Makes a DeepSpeed engine step on gradients that the reducer of the returned step has reduced.

    `parameters` are the engine's, in the order of the model. The engine's groups are the buckets.
    """
    optimizer, precision, zero_stage = engine.optimizer, config.precision, config.parallel.zero_stage
    take_over_reduction(engine)
    keep_loss_scale_on_device(engine)
    replicas, dtype = _ranks_of(optimizer.dp_process_group), TORCH_DTYPES[precision.gradient_accumulation_dtype]
    if zero_stage == 3:
        buckets: list[Bucket] = [ShardedBucket.of(group, dtype, replicas) for group in partitioned_groups(optimizer)]
    else:
        buckets = [
            Bucket(
                [BucketSlice(parameter, group.start(parameter), parameter.shape) for parameter in group.parameters],
                len(group.weights),
                dtype,
                _ranks_of(group.replicas),
                group.gradients,
            )
            for group in flat_groups(optimizer)
        ]
    kind: type[PartitionedStep] = ShardedStep if zero_stage == 3 else PartitionedStep
    reducer: GradientReducer
    if config.compression.gradients != "none" and replicas.size > 1:
        kind = CompressedStep
        reducer = CompressedReducer(buckets, parameters, replicas.size, config.compression, activity, tp.group)
    else:
        wire, in_rounds = TORCH_DTYPES[precision.reduction_dtype], zero_stage > 1
        reducer = GradientReducer(buckets, parameters, replicas.size, wire, activity, tp.group, in_rounds=in_rounds)
    step = optimizer.step = kind(optimizer, reducer, decision, config, tp.rank)
    return step


def _ranks_of(group: dist.ProcessGroup) -> RankGroup:
    return RankGroup(dist.get_world_size(group), dist.get_rank(group), group)
