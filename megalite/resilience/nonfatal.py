"""Sections that may fail without ending a run: logging, plots, wandb, sinks, mirrors.

Never put the step itself or a collective into one: a rank that skipped a collective alone would leave the others
waiting.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Nonfatal:
    """Sections whose exceptions are counted and reported instead of raised; threads may share it.

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

    def summary(self) -> dict[str, dict[str, int | str]]:
        """Returns the failures so far, for receipt.json."""
        with self._lock:
            return {name: {"count": count, "last": last} for name, (count, last) in sorted(self._failures.items())}

    def sentence(self) -> str:
        """Returns the failures so far as a sentence for the console; empty if there are none."""
        with self._lock:
            failures = sorted(self._failures.items())
        failed = [f"{name} {_times(count)} (last: {last})" for name, (count, last) in failures]
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
