"""Observers of a run, which see what happens while it trains and change nothing of it, and sections that may fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from megalite.monitor.records.step import StepRecord

if TYPE_CHECKING:
    from megalite.checkpoint.saver import Saved  # pulls in torch, which readers of metrics.jsonl do not need
    from megalite.monitor.steps.breakdown import StepBreakdown
    from megalite.monitor.steps.slow_ranks import SlowRank


class Observer:
    """Base class; every method may be left out. Only rank 0 has observers that write anything.

    The run's log calls observers in the order of its list. One that raises is counted and reported, and the run goes
    on; so nothing in an observer may be collective.
    """

    name: str  # under which its failures are reported; by default the class's

    def __init_subclass__(cls) -> None:
        cls.name = cls.__dict__.get("name", cls.__name__)

    def on_start(self) -> None:
        """Is called before the first step."""

    def measure(self, record: StepRecord) -> StepRecord:
        """Returns the fields that it adds to the record of a step, which has those of the observers before it."""
        return {}

    def on_step(self, record: StepRecord) -> None:
        """Takes the record of a step, as in metrics.jsonl, when all have measured."""

    def before_evaluation(self, record: StepRecord) -> None:
        """Takes the record of a step that is saved before it is evaluated; `on_step` follows with the whole record."""

    def on_late_evaluation(self, found: StepRecord) -> None:
        """Takes what a resumed run adds to the record of its last step, whose evaluation was cut off."""

    def on_breakdown(self, breakdown: StepBreakdown) -> None:
        """Takes what the last steps spent their time on, every `monitor.log_interval` steps; before `on_step`."""

    def on_slow_rank(self, change: SlowRank) -> None:
        """Takes a rank that has become slow, or is so no longer."""

    def on_intervention(self, facts: dict[str, Any], sentence: str) -> None:
        """Takes what a guard did about a step that was not taken, for events.jsonl and for the console."""

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        """Takes the result of a save that has ended, complete or failed; `if_failed` says what follows a failure."""

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        """Is called when training has ended as it should, with one of `goodput.ENDS`.

        `save_blocked_s`: how long training waited for saves that no step's record contains.
        """

    def sync(self) -> None:
        """Waits until the records so far are on disk: the next checkpoint holds their steps. Called in a thread."""

    def close(self) -> None:
        """Is called last, also after a crash."""


class Nonfatal:
    """Sections whose exceptions are counted and reported instead of raised; threads may share it.

    Never put the step itself or a collective into one: a rank that skipped a collective alone would leave the others
    waiting.

    `with nonfatal("metrics.jsonl"): sink.log(record)`
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        """`report` takes one sentence and may fail itself.

        KeyboardInterrupt, SystemExit and other exceptions that are no `Exception` are raised all the same.
        """
        self._report = report
        self._failures: dict[str, tuple[int, str]] = {}  # name -> number of failures, reason of the last
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Opens one section; `name` is what the user knows it by."""
        try:
            yield
        except Exception as error:
            self._count(name, error)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Returns the failures so far, for receipt.json."""
        with self._lock:
            return {name: {"count": count, "last": last} for name, (count, last) in sorted(self._failures.items())}

    def sentence(self) -> str:
        """Returns the failures so far as a sentence for the console; empty if there are none."""
        failed = [f"{name} {_times(one['count'])} (last: {one['last']})" for name, one in self.summary().items()]
        return f"failed while training went on: {'; '.join(failed)}" if failed else ""

    def _count(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300].rstrip(": ")
        with self._lock:
            count = 1 + self._failures.get(name, (0, ""))[0]
            self._failures[name] = count, reason
        if str(count).rstrip("0") == "1":  # the 1st, 10th, 100th time
            with contextlib.suppress(Exception):  # the console may be what fails
                self._report(f"{name} failed {_times(count)}, training goes on: {reason}")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
