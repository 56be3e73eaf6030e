"""Sections that may fail without ending a run: logging, plots, wandb, sinks, mirrors.

Never put the step itself or a collective into one: a rank that skipped a collective alone would leave the others
waiting.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class _Failures:
    """Number of failures of one section and the reason of the last."""

    count: int
    last: str


class Nonfatal:
    """Sections whose exceptions are counted and reported instead of raised; threads may share it.

    `with nonfatal("metrics.jsonl"): sink.log(record)`
    """

    def __init__(self, report: Callable[[str], None], passes: tuple[type[Exception], ...] = ()) -> None:
        """`report` takes one sentence and may fail itself; `passes` are exceptions that are raised all the same.

        KeyboardInterrupt, SystemExit and other exceptions that are no `Exception` are always raised.
        """
        self._report = report
        self._passes = passes
        self._failures: dict[str, _Failures] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Opens one section; `name` is what the user knows it by."""
        try:
            yield
        except self._passes:
            raise
        except Exception as error:
            self._count(name, error)

    def summary(self) -> dict[str, dict[str, int | str]]:
        """Returns the failures so far, for receipt.json."""
        with self._lock:
            return {name: asdict(one) for name, one in sorted(self._failures.items())}

    def sentence(self) -> str:
        """Returns the failures so far as a sentence for the console; empty if there are none."""
        with self._lock:
            failed = [f"{name} {_times(one.count)} (last: {one.last})" for name, one in sorted(self._failures.items())]
        return f"failed while training went on: {'; '.join(failed)}" if failed else ""

    def _count(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300].rstrip(": ")
        with self._lock:
            earlier = self._failures.get(name)
            count = 1 + (earlier.count if earlier else 0)
            self._failures[name] = _Failures(count, reason)
        if str(count).rstrip("0") == "1":  # the 1st, 10th, 100th time
            with contextlib.suppress(Exception):  # the console may be what fails
                self._report(f"{name} failed {_times(count)}, training goes on: {reason}")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
