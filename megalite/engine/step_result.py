"""The result of one optimizer step, whose numbers the host reads when it wants them.

On an accelerator the host runs ahead of the device. A step's numbers are copied to the host's memory behind the step
itself, so that reading them waits for that step alone, not for the steps that have been queued since.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class StepNumbers(NamedTuple):
    """The numbers of a step on the host, equal on all ranks."""

    loss: float  # mean over the valid tokens of the global batch
    grad_norm: float  # global, before clipping; inf where the step was skipped
    skipped: bool  # the loss or the gradients were not finite, and the weights did not change
    loss_scale: float | None = None  # that the step was computed with; None: not fp16, or one that never changes


class Readback:
    """The numbers of a step on their way from the device to the host."""

    def __init__(
        self,
        loss: Tensor,
        grad_norm: Tensor | float,
        skipped: Tensor | bool,
        expert_usage: Tensor | None = None,
        source_losses: Tensor | None = None,
        loss_scaler: Tensor | None = None,
    ) -> None:
        """`loss` is on the device of the step, `expert_usage` is that of `ExpertCounts`, `source_losses` the sums of
        `SourceLosses` over all replicas, `loss_scaler` that of `StepResult`; makes no one wait."""
        parts = [part if isinstance(part, Tensor) else loss.new_full((), float(part)) for part in (grad_norm, skipped)]
        parts += [] if loss_scaler is None else [loss_scaler[0]]
        parts = [part.detach().to(loss.device, torch.float64, non_blocking=True) for part in (loss, *parts)]
        numbers, self._scalars = torch.stack(parts), len(parts)
        self._shapes = [None if table is None else table.shape for table in (expert_usage, source_losses)]
        if tables := [table.flatten() for table in (expert_usage, source_losses) if table is not None]:
            numbers = torch.cat([numbers, *tables])
        self._host, self._is_copied = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._is_copied = torch.cuda.Event()
            self._is_copied.record()

    @cached_property
    def numbers(self) -> StepNumbers:
        """The numbers; the first use waits for the step."""
        self._wait()
        loss, grad_norm, skipped, *scale = self._host[: self._scalars].tolist()
        return StepNumbers(loss, grad_norm, bool(skipped), *scale)

    @property
    def expert_usage(self) -> Tensor | None:
        """The use of experts by this rank's micro-batches on the host, as in `ExpertCounts.usage`; waits for the
        step."""
        shape, _ = self._shapes
        if shape is None:
            return None
        self._wait()
        return self._host[self._scalars : self._scalars + shape.numel()].view(shape)

    @property
    def source_losses(self) -> Tensor | None:
        """The sums of losses and the valid targets of each source over the global batch on the host, `[2, sources]`
        float64; None if the data is one text. Waits for the step."""
        _, shape = self._shapes
        if shape is None:
            return None
        self._wait()
        return self._host[-shape.numel() :].view(shape)

    def _wait(self) -> None:
        if self._is_copied is not None:
            self._is_copied.synchronize()


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, equal on all ranks. Its numbers wait for the step when they are first read."""

    readback: Readback
    refused: bool = False  # the gate refused the step, and the weights did not change
    micro_losses: tuple[Tensor, ...] = ()  # this rank's loss of each micro-batch; empty without the last layer
    token_weight: Tensor | None = None  # the factor on a micro-batch's summed loss: `Engine._token_weight`
    part_norms: Tensor | None = None  # of this rank's gradients, if a skip was decided on the device: `PartitionedStep`
    loss_scaler: Tensor | None = None  # fp16's dynamic loss scale before the step: `loss_scaler_tensor`

    @property
    def loss(self) -> float:
        """The mean over the valid tokens of the global batch."""
        return self.readback.numbers.loss

    @property
    def grad_norm(self) -> float:
        """The norm of the global gradient before clipping; inf where the weights did not change."""
        return self.readback.numbers.grad_norm

    @property
    def skipped(self) -> bool:
        """True if the loss or the gradients were not finite, and the weights did not change."""
        return self.readback.numbers.skipped

    @property
    def taken(self) -> bool:
        """True if the weights changed."""
        return not (self.skipped or self.refused)
