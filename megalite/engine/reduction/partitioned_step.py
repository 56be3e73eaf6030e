"""The optimizer step on gradients that `GradientReducer` has reduced.

Each rank works on its own partition alone: the norm, clipping and the update read no number that another replica owns.
A step that is not finite is skipped on the device: the torch optimizer is given `grad_scale`, by which it divides the
gradients, and `found_inf`, 1 if it must change nothing, as torch.amp.GradScaler gives them to fused optimizers. Where
the optimizer is on the host, the host decides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import Config
from megalite.engine.deepspeed.step import current_loss_scale, flat_partitions
from megalite.engine.reduction.gradient_reduction import GradientReducer
from megalite.engine.step_decision import StepDecision

# torch sums the squares of a tensor on a CPU in eight fp32 numbers: of 5e7 elements the norm is 0.4 % wrong, of 2^16
# less than 1e-6
SUMMED_AT_ONCE = {"cpu": 1 << 16}


class PartitionedStep:
    """Replaces the `step` of a DeepSpeed optimizer of ZeRO-1 or ZeRO-2."""

    def __init__(
        self, optimizer: Any, reducer: GradientReducer, decision: StepDecision, config: Config, tensor_rank: int
    ) -> None:
        self._optimizer, self.reducer, self._decision = optimizer, reducer, decision
        self._clipping, self._tensor_rank = config.training.gradient_clipping, tensor_rank
        self._is_on_host = config.is_optimizer_offloaded
        # else `WeightGathers` shares new weights, or ZeRO-3's own step
        self._is_alone = config.parallel.zero_stage < 3 and dist.get_world_size(optimizer.dp_process_group) == 1
        self._counts: Tensor | None = None  # 1 or 0 for each of the norm's parts, the same in every step
        self.parts: list[nn.Parameter] = []  # the parameter of each of the norm's parts
        self.part_norms: Tensor | None = None  # of the last step; None on a rank without a part

    @torch.no_grad()
    def __call__(self) -> None:
        """Steps the optimizer, unless the step is not taken; the new weights go to other replicas when it is over."""
        optimizer = self._optimizer
        scale = current_loss_scale(optimizer)
        norm = self._measure_norms() / scale
        is_taken, found_inf = self._decision.by_norm(norm)
        if is_taken:
            self._update(norm, scale, found_inf)
        self.reducer.release()
        if self._is_alone and not optimizer.overflow:
            optimizer.update_lp_params()

    def _update(self, norm: Tensor, scale: Tensor | float, found_inf: Tensor | None) -> None:
        """Runs the torch optimizer on this rank's partition, whose gradients it divides and clips on the way."""
        torch_optimizer, partitions = self._optimizer.optimizer, flat_partitions(self._optimizer)
        divisor = None
        if isinstance(scale, Tensor) or scale != 1.0:
            divisor = torch.ones_like(norm) * scale
        if self._clipping:
            divisor = ((norm + 1e-6) / self._clipping).clamp(min=1.0) * scale
        if self._is_on_host:
            return self._update_on_host(partitions, divisor)
        torch_optimizer.grad_scale, torch_optimizer.found_inf = divisor, found_inf
        for weights, gradient in zip(partitions, self.reducer.partitions, strict=True):
            weights.grad = gradient
        torch_optimizer.step()
        torch_optimizer.zero_grad()

    def _update_on_host(self, partitions: list[Tensor], divisor: Tensor | None) -> None:
        """Runs the torch optimizer on the host, which waits for the gradients, divided on the device."""
        gradients = self.reducer.partitions
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        # DeepSpeed keeps pinned memory for them
        for weights, gradient in zip(partitions, gradients, strict=True):
            assert weights.grad is not None
            weights.grad.copy_(gradient, non_blocking=True)
        if gradients[0].is_cuda:
            torch.cuda.current_stream(gradients[0].device).synchronize()
        self._optimizer.optimizer.step()

    def _measure_norms(self) -> Tensor:
        """Returns the 2-norm of the mean gradient of the whole model, an fp32 scalar, and keeps those of its parts, for
        a report of a step that is not finite; collective over all ranks.

        Every rank adds its own partition's squares; what all tensor-parallel ranks hold counts on the first of them.
        """
        parts, counts = list[Tensor](), list[float]()
        self.parts = []
        for parameter, _, gradient in self.reducer.own_parts():
            pieces = gradient.split(SUMMED_AT_ONCE.get(gradient.device.type, len(gradient)))
            parts += pieces
            counts += [float(parameter.tensor_model_parallel or self._tensor_rank == 0)] * len(pieces)  # type: ignore[attr-defined]
            self.parts += [parameter] * len(pieces)
        # in fp64, so that the sum of many squares costs no digit
        squares = torch.zeros((), dtype=torch.float64, device=self.reducer.device)
        if parts:
            # times zero, not left out: a copy that is not finite on this rank alone makes the norm not finite either
            self.part_norms = norms = torch.stack(torch._foreach_norm(parts)).double()
            if self._counts is None:
                self._counts = torch.tensor(counts, dtype=torch.float64, device=self.reducer.device)
            squares = (norms.square() * self._counts).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt().float()
