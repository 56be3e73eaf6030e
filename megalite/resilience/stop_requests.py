"""Requests to stop or save, on which all ranks agree after each step.

Signals reach ranks at different moments, and only one clock can decide when time is up: one small reduction per step
on the CPU makes all ranks end after the same step.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from megalite.engine.distributed import group_timeout
from megalite.resilience.signals import PREEMPTION


class StopRequests:
    """Collects requests while it is open.

    Signals after the first one are ignored: launchers send more of them to ranks that are still leaving when the first
    has left. To end a rank at once send SIGKILL, or stop the command that started it.
    """

    def __init__(self, max_minutes: float | None, started: float) -> None:
        """Collective. `started` is a reading of `time.monotonic` that the limit counts from."""
        self._deadline = None if max_minutes is None else started + 60 * max_minutes
        self._limit = f"training.max_minutes ({max_minutes:g}) is over" if max_minutes else ""
        self._signal = 0
        several = dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=group_timeout()) if several else None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in PREEMPTION}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._signal else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def agree(self, save_next: bool) -> tuple[str | None, bool]:
        """Agrees on a decision, equal on all ranks; collective. Rank 0's clock and `save_next` count, and all signals.

        Returns the reason to save and end now, or None, and whether a checkpoint is due after the coming step.
        """
        is_over = self._deadline is not None and time.monotonic() >= self._deadline
        first = dist.get_rank() == 0
        flags = torch.tensor([self._signal, is_over and first, save_next and first], dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        number, is_over, save_next = flags.tolist()
        stop = f"signal {signal.Signals(number).name}" if number else self._limit if is_over else None
        return stop, bool(save_next)
