"""Requests to stop or save, on which all ranks agree after each step.

Signals reach ranks at different moments, and only one clock can decide when time is up: one small reduction per step
on the CPU makes all ranks end after the same step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from megalite.engine.deepspeed.process_groups import group_timeout
from megalite.resilience.signals import ANNOUNCEMENTS, take_signals
from megalite.units import plural

log = logging.getLogger(__name__)
SILENCE_S = 10.0  # longest silence between a request to stop and the end of its step


@dataclass(frozen=True)
class Stop:
    """A reason to save and end now, equal on all ranks."""

    reason: str  # begins a sentence
    is_interrupt: bool = False  # a person pressed Ctrl-C


class Agreement(NamedTuple):
    """Decisions after a step, equal on all ranks."""

    stop: Stop | None  # why to save and end now
    save_next: bool  # a checkpoint is due after the coming step
    profile_next: bool  # the coming step is profiled
    gather_next: bool  # ranks tell rank 0 what steps went into after the coming one


class StopRequests:
    """Collects requests while it is open.

    The first signal is a request, and rank 0 says at once what it leads to. Signals after it are ignored but for a
    repeated SIGINT, SIGTERM or SIGHUP, which ends the rank at once, unless a supervisor takes those.
    """

    def __init__(self, max_minutes: float | None, started: float) -> None:
        """Collective. `started` is a reading of `time.monotonic` that the limit counts from."""
        self._deadline = None if max_minutes is None else started + 60 * max_minutes
        self._limit = f"training.max_minutes ({max_minutes:g}) is over" if max_minutes else ""
        self._signals = take_signals()
        # of all ranks on the CPU; None for a rank alone
        self.group = dist.new_group(backend="gloo", timeout=group_timeout()) if dist.get_world_size() > 1 else None
        self._is_agreed, self.stops_after = False, "this step"
        self._step, self._saved_step = 0, lambda: 0
        self._step_began, self._last_step_s = time.monotonic(), 0.0
        self._has_ended = threading.Event()  # the step in which a signal came
        self._reminder: threading.Thread | None = None  # that a long step still goes on, once it is the last

    def __enter__(self) -> Self:
        self._signals.begin_training(self._answer if dist.get_rank() == 0 else lambda number: "")
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._signals.end_training()

    def begin_step(self, step: int, saved_step: Callable[[], int]) -> None:
        """Notes that `step` begins, from 1, and who knows up to which step the run is saved."""
        self._step, self._saved_step, self._step_began = step, saved_step, time.monotonic()

    def agree(self, *, save_next: bool, profile_next: bool = False, gather_next: bool = False) -> Agreement:
        """Agrees on what comes next; collective. All ranks' signals count, and rank 0's clock and arguments."""
        self._last_step_s = time.monotonic() - self._step_began
        asked = [self._is_over(), save_next, profile_next, gather_next] if dist.get_rank() == 0 else [False] * 4
        number, is_over, *agreed = self._largest([self._signals.first, *asked])
        self._is_agreed = bool(number or is_over)
        stop = Stop(self._limit) if is_over else None
        if number:
            self._has_ended.set()
            stop = Stop(f"signal {signal.Signals(number).name}", number == signal.SIGINT)
        return Agreement(stop, *map(bool, agreed))

    def agree_on_part(self, count: int) -> int:
        """Agrees on the next part of an evaluation: rank 0's `count`, 0 once the run is asked to end. Collective."""
        number, count = self._largest([self._signals.first, 0 if dist.get_rank() or self._is_over() else count])
        return 0 if number else count

    def _largest(self, numbers: list[int]) -> list[int]:
        """Returns the largest of all ranks at each place."""
        if self.group is None:
            return numbers
        of_all = torch.tensor(numbers)
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=self.group)
        return of_all.tolist()

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def is_asked(self) -> bool:
        """True if the run was asked to end in its last step, or this rank has got a signal since. Not collective."""
        return self._is_agreed or self._signals.first != 0

    def _remind(self) -> None:
        while not self._has_ended.wait(SILENCE_S):
            log.info(f"step {self._step} still goes on ({time.monotonic() - self._step_began:.0f} s so far)")

    def _answer(self, number: int) -> str:
        """Returns what a signal leads to and what a second one would cost. Runs in the thread that takes signals."""
        if self._reminder is None:
            self._reminder = threading.Thread(target=self._remind, name="stop reminder", daemon=True)
            self._reminder.start()
        name = "" if number == signal.SIGINT else f"{signal.Signals(number).name}: "
        lost = max(1, self._step - self._saved_step())
        again = "press Ctrl-C again to end now" if number == signal.SIGINT else "a second one ends the run now"
        cost = "" if number in ANNOUNCEMENTS else f"; {again}, which loses {plural(lost, 'step')}"
        times = f"step {self._step} began {time.monotonic() - self._step_began:.0f} s ago"
        if self._last_step_s:
            times += f", the one before took {self._last_step_s:.3g} s"
        return f"{name}stopping after {self.stops_after}{cost} ({times})"
