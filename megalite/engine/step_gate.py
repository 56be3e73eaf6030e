"""The gate of an optimizer step, which may refuse it after its gradients are known and before weights change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import TensorParallel


class StepGate(Protocol):
    """Decides which steps are taken. Every rank has one, and all must answer alike."""

    @property
    def waits(self) -> bool:
        """True if `takes` has to be asked in each step before weights change, for which the host waits for the device.

        Otherwise a step that is not finite is skipped on the device where it can be, and nothing here is called. Such a
        step holds back all that follow it until `Engine.allow_updates`, so that it may be examined later.
        """

    def takes(self, loss: Callable[[], float]) -> bool:
        """Returns whether a step with finite gradients is taken.

        `loss()` is the mean over the valid tokens of the global batch, the same bits on all ranks. It is collective
        and waits for the device: call it on all ranks or on none.
        """

    def examine(self) -> None:
        """Is called on all ranks when a step is not taken, while its gradients still exist."""


class GatedStep:
    """One optimizer step that a `StepGate` may refuse; without a gate every finite step is taken."""

    def __init__(self, gate: StepGate | None, optimizer: Any, tp: TensorParallel) -> None:
        self._gate, self._optimizer, self._tp = gate, optimizer, tp
        self.refused = False  # finite, and not taken by the gate
        self._loss: float | None = None  # if it has come to the host together with the norm

    @contextmanager
    def open(self, loss: Callable[[], Tensor]) -> Iterator[None]:
        """Asks the gate in each optimizer step of the `with`; `loss` computes the step's loss, once.

        A refused step does what DeepSpeed does on an overflow: weights, moments and step counts stay, gradients and
        buffers are cleared, `skipped_steps` grows; fp16's loss scale stays.

        DeepSpeed offers no callback between its check for overflow and the update, so the function is replaced that
        every step calls there: `_update_scale` of DeepSpeedZeroOptimizer and DeepSpeedZeroOptimizer_Stage3
        (runtime/zero/stage_1_and_2.py and stage3.py), which look at `overflow` after it; for BF16_Optimizer
        (runtime/bf16_optimizer.py) its module's `is_invalid_grad_norm`, which nothing else calls.
        """
        if self._gate is None:
            yield
            return
        gate, optimizer = self._gate, self._optimizer

        def refuses(is_not_finite: bool) -> bool:
            self.refused = not is_not_finite and not gate.takes(lambda: self._read(loss()))
            if is_not_finite or self.refused:
                gate.examine()
            return self.refused

        if hasattr(optimizer, "_update_scale"):
            update_scale = optimizer._update_scale

            def ask_first(has_overflow: bool = False) -> None:
                if refuses(has_overflow):
                    optimizer.overflow = True
                else:
                    update_scale(has_overflow)

            optimizer._update_scale = ask_first
            try:
                yield
            finally:
                del optimizer._update_scale
            return
        is_invalid = bf16_optimizer.is_invalid_grad_norm

        def ask_or_invalid(norm: Any) -> bool:
            has_overflow = is_invalid(norm)
            return refuses(has_overflow) or has_overflow

        bf16_optimizer.is_invalid_grad_norm = ask_or_invalid
        try:
            yield
        finally:
            bf16_optimizer.is_invalid_grad_norm = is_invalid

    def reads(self, loss: Callable[[], Tensor]) -> Callable[[Tensor], float]:
        """Returns a function that brings the norm of the gradients to the host, and the loss for the gate with it."""

        def read(norm: Tensor) -> float:
            norm_on_host, self._loss = torch.stack([norm.double(), self._common(loss()).double()]).tolist()
            return float(norm_on_host)

        return read

    def _read(self, loss: Tensor) -> float:
        return float(self._common(loss)) if self._loss is None else self._loss

    def _common(self, loss: Tensor) -> Tensor:
        """Returns the first tensor-parallel rank's loss: each has computed its own, maybe with another last bit."""
        if self._tp.group is not None and self._tp.size > 1:
            dist.broadcast(loss, src=dist.get_global_rank(self._tp.group, 0), group=self._tp.group)
        return loss
