"""The interface of what reduces gradients over micro-batches and replicas, and DeepSpeed's own way behind it."""

from __future__ import annotations

from typing import Any, Protocol

from megalite.engine.deepspeed.step import clear_gradient_partitions


class Reduction(Protocol):
    """Reduces the gradients of one step after the other."""

    def begin(self, micro_batches: int) -> None:
        """Prepares for the backward passes of a step over so many micro-batches of this replica."""

    def finish(self) -> None:
        """Ends the reduction behind the last backward pass; collective."""


class DeepSpeedReduction:
    """The reduction of ZeRO-3 and offloaded optimizers: DeepSpeed's, as backward passes and its step go."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def begin(self, micro_batches: int) -> None:
        clear_gradient_partitions(self._optimizer)

    def finish(self) -> None:
        pass  # DeepSpeed's `step` does
