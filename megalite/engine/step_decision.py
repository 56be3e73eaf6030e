"""The decision whether an optimizer step is taken, after its gradients are known and before weights change.

The device decides where it can: a step that is not finite changes nothing there but fp16's loss scale, and the host
hears of it a step later. The host does for a gate that wants to be asked, and for an optimizer that is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.deepspeed.step import leave_to_device, takes_step
from megalite.parallel.collectives import TensorParallel


class StepGate(Protocol):
    """Decides which steps are taken. Every rank has one, and all must answer alike."""

    @property
    def waits(self) -> bool:
        """True if `takes` has to be asked in each step before weights change, for which the host waits for the device.

        Otherwise a step that is not finite is skipped on the device where it can be, and nothing here is called. Such a
        step holds back all that follow it until `StepDecision.allow_updates`, so that it may be examined later.
        """

    def takes(self, loss: Callable[[], float]) -> bool:
        """Returns whether a step with finite gradients is taken.

        `loss()` is the mean over the valid tokens of the global batch, the same bits on all ranks. It is collective
        and waits for the device: call it on all ranks or on none.
        """

    def examine(self) -> None:
        """Is called on all ranks when a step is not taken, while its gradients still exist."""


class StepDecision:
    """Decides about each step of one engine, and keeps what was decided about the last."""

    def __init__(self, engine: Any, tp: TensorParallel, *, may_be_late: bool) -> None:
        """engine: DeepSpeed's. `may_be_late` where the device can decide, because nothing on the host has to know."""
        self._engine, self._tp, self._may_be_late = engine, tp, may_be_late
        self._gate: StepGate | None = None
        self._loss: Callable[[], Tensor] = lambda: torch.zeros(())
        self._loss_on_host: float | None = None  # if it has come there together with the norm
        self._is_held = torch.zeros((), device=engine.device)  # 1: a step that was skipped holds back the next ones
        self.refused = False  # finite, and not taken by the gate
        self.left_out = False  # as far as the host knows
        self.skipped_on_device: Tensor | None = None  # 1 or 0, where the device decides

    @property
    def skipped(self) -> Tensor | bool:
        """True, or a 1 on the device if that decided, where the loss or the gradients were not finite."""
        return self.left_out and not self.refused if self.skipped_on_device is None else self.skipped_on_device

    def is_late(self, gate: StepGate | None) -> bool:
        """Returns whether a step that is not finite is skipped on the device, without the host, which hears of it late.

        It is not where the gate has to be asked, or where the optimizer is on the host.
        """
        return self._may_be_late and (gate is None or not gate.waits)

    def allow_updates(self) -> None:
        """Ends what a step that was skipped on the device holds back."""
        self._is_held = torch.zeros_like(self._is_held)

    @contextmanager
    def about(self, gate: StepGate | None, loss: Callable[[], Tensor]) -> Iterator[None]:
        """Decides about the optimizer step of the `with`; `loss` computes the step's loss, once.

        A refused step does what DeepSpeed does on an overflow: weights, moments and step counts stay, gradients and
        buffers are cleared, `skipped_steps` grows; fp16's loss scale stays.
        """
        self._gate, self._loss, self._loss_on_host = gate, loss, None
        self.refused, self.skipped_on_device = False, None
        before = self._engine.skipped_steps
        yield
        self.left_out = self._engine.skipped_steps > before

    def by_norm(self, norm: Tensor) -> tuple[bool, Tensor | None]:
        """Decides about a step by the norm of its gradients, an fp32 scalar without fp16's loss scale.

        Returns whether the torch optimizer steps, and the tensor that tells it on the device by a 1 to change nothing.
        """
        optimizer = self._engine.optimizer
        if not self.is_late(self._gate):
            is_finite = math.isfinite(self._on_host(norm))
            return takes_step(optimizer, norm, is_finite=is_finite, is_refused=self._refuses(not is_finite)), None
        is_held, overflow = self._is_held, ~torch.isfinite(norm)
        skipped = overflow.float()
        if self._gate is not None:  # it may want to look into the step before the next one changes weights
            skipped = self._is_held = torch.maximum(skipped, is_held)
        self.skipped_on_device = skipped
        leave_to_device(optimizer, norm.masked_fill(skipped.bool(), float("inf")), overflow, is_held)
        return True, skipped

    def _on_host(self, norm: Tensor) -> float:
        """Brings the norm to the host, and with it the loss where the gate will ask for that."""
        if self._gate is None or not self._gate.waits:
            return float(norm)
        on_host, self._loss_on_host = torch.stack([norm.double(), self._common_loss().double()]).tolist()
        return float(on_host)

    def _refuses(self, is_not_finite: bool) -> bool:
        if self._gate is None:
            return False
        self.refused = not is_not_finite and not self._gate.takes(self._read_loss)
        if is_not_finite or self.refused:
            self._gate.examine()
        return self.refused

    def _read_loss(self) -> float:
        return float(self._common_loss()) if self._loss_on_host is None else self._loss_on_host

    def _common_loss(self) -> Tensor:
        """Returns the first tensor-parallel rank's loss: each has computed its own, maybe with another last bit."""
        loss = self._loss()
        if self._tp.group is not None and self._tp.size > 1:
            dist.broadcast(loss, src=dist.get_global_rank(self._tp.group, 0), group=self._tp.group)
        return loss
