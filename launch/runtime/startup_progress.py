"""An observer that says until the first step what takes long, so that nobody has to guess whether a start hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from launch.runtime.logs import get_logger
from launch.runtime.rank_environment import Rank
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord

log = get_logger(__name__)
SILENCE_S = 8.0  # longest silence of rank 0 from the start of its process to the end of the first step
TICK_S = 0.25


class StartupProgress(Observer):
    """Names the current part of the start whenever SILENCE_S have passed without a line, from a thread of its own.

    Use it as a context; the thread ends with it, or with the run's first step. Only rank 0 speaks, but for parts that
    concern each host.
    """

    name = "the start's progress"

    def __init__(self, rank: Rank, process_began: float) -> None:
        """`process_began` is a reading of `time.monotonic`."""
        self.process_began = process_began
        self.at_first_step: list[Callable[[], None]] = []  # called once, when that step has ended
        self._rank, self._said_at = rank, process_began
        self._doing: Callable[[], str] | None = None
        self._every_s = SILENCE_S
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start-up progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, what: str) -> None:
        """Notes which part of the start begins; `what` is told together with the time it has taken so far."""
        began = time.monotonic()
        self._set(lambda: f"{what} ({time.monotonic() - began:.0f} s so far)", SILENCE_S)

    def begin_waiting(self, sentence: Callable[[], str], every_s: float, *, on_each_host: bool = False) -> None:
        """Notes that this rank waits for others; `sentence` says for whom, after SILENCE_S and then every `every_s`."""
        self._set(sentence, every_s, on_each_host)

    def on_step(self, record: StepRecord) -> None:
        self.close()
        while self.at_first_step:
            self.at_first_step.pop()()

    def close(self) -> None:
        self._is_over.set()

    def _set(self, doing: Callable[[], str], every_s: float, on_each_host: bool = False) -> None:
        speaks = self._rank.rank == 0 or (on_each_host and self._rank.local_rank == 0)
        self._doing, self._every_s = doing if speaks else None, every_s

    def _watch(self) -> None:
        pause_s, told = SILENCE_S, None
        while not self._is_over.wait(TICK_S):
            doing = self._doing
            if doing is not told:
                pause_s = SILENCE_S
            if doing is not None and time.monotonic() - self._said_at >= pause_s:
                log.info("%s", doing())
                self._said_at, pause_s, told = time.monotonic(), self._every_s, doing
