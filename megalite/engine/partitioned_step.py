"""The optimizer step of ZeRO-1 on gradients that `GradientReducer` has reduced.

Each rank works on its own partition alone: the norm, clipping and the update read no number that another replica owns.
The host waits for the device once, to learn whether the norm is finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import Config
from megalite.engine.activity import Activity
from megalite.engine.deepspeed_internals import flat_partitions, take_over_reduction, takes_step
from megalite.engine.gradient_reduction import Bucket, GradientReducer, Slice
from megalite.engine.stages import TORCH_DTYPES
from megalite.parallel.collectives import TensorParallel

# torch sums the squares of a tensor on a CPU in eight fp32 numbers: of 5e7 elements the norm is 0.4 % wrong, of 2^16
# less than 1e-6
SUMMED_AT_ONCE = {"cpu": 1 << 16}


class PartitionedStep:
    """Replaces the `step` of a DeepSpeed optimizer of ZeRO-1."""

    def __init__(self, optimizer: Any, reducer: GradientReducer, clipping: float, tensor_rank: int) -> None:
        """`clipping` is the largest norm that is left alone, 0 for none."""
        self._optimizer, self._reducer, self._clipping = optimizer, reducer, clipping
        self._tensor_rank = tensor_rank
        self._counts: Tensor | None = None  # 1 or 0 for each of the norm's parts, the same in every step

    @torch.no_grad()
    def __call__(self) -> None:
        """Steps the optimizer and shares the new weights with the other replicas, unless the step is not taken."""
        optimizer, gradients = self._optimizer, self._reducer.partitions
        scale = float(getattr(optimizer, "loss_scale", 1.0))  # BF16_Optimizer has none
        norm = self.gradient_norm() / scale
        if takes_step(optimizer, norm):
            if self._clipping:
                torch._foreach_mul_(gradients, (self._clipping / (norm + 1e-6)).clamp(max=1.0) / scale)
            elif scale != 1.0:
                torch._foreach_mul_(gradients, 1.0 / scale)
            partitions = flat_partitions(optimizer)
            for weights, gradient in zip(partitions, gradients, strict=True):
                weights.grad = gradient
            optimizer.optimizer.step()
            for weights in partitions:
                weights.grad = None
        self._reducer.release()
        if not optimizer.overflow:
            optimizer.update_lp_params()

    def gradient_norm(self) -> Tensor:
        """Returns the 2-norm of the mean gradient of the whole model, an fp32 scalar; collective over all ranks.

        Every rank adds its own partition's squares; what all tensor-parallel ranks hold counts on the first of them.
        """
        parts: list[Tensor] = []
        counts: list[float] = []
        for parameter, _, gradient in self._reducer.own_parts():
            is_counted = parameter.tensor_model_parallel or self._tensor_rank == 0  # type: ignore[attr-defined]
            pieces = gradient.split(SUMMED_AT_ONCE.get(gradient.device.type, len(gradient)))
            parts += pieces
            counts += [float(is_counted)] * len(pieces)
        device = self._reducer.partitions[0].device
        # in fp64, so that the sum of many squares costs no digit
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if parts:
            # times zero, not left out: a copy that is not finite on this rank alone makes the norm not finite either
            norms = torch.stack(torch._foreach_norm(parts)).double()
            if self._counts is None:
                self._counts = torch.tensor(counts, dtype=torch.float64, device=device)
            squares = (norms.square() * self._counts).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt().float()


def partition_reductions(
    engine: Any, parameters: Iterable[nn.Parameter], config: Config, activity: Activity, tp: TensorParallel
) -> GradientReducer:
    """Makes a DeepSpeed engine of ZeRO-1 step on gradients that the returned reducer has reduced.

    `parameters` are the engine's, in the order of the model. The engine's groups are the buckets.
    """
    groups, replicas = take_over_reduction(engine)
    precision = config.precision
    buckets = [
        Bucket(
            [Slice(parameter, group.start(parameter)) for parameter in group.parameters],
            len(group.weights),
            TORCH_DTYPES[precision.gradient_accumulation_dtype],
            group.gradients,
        )
        for group in groups
    ]
    wire_dtype = TORCH_DTYPES[precision.reduction_dtype]
    reducer = GradientReducer(buckets, parameters, replicas, wire_dtype, activity, tp.group)
    engine.optimizer.step = PartitionedStep(engine.optimizer, reducer, config.training.gradient_clipping, tp.rank)
    return reducer
