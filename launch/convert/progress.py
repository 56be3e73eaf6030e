"""What is watched while a conversion runs: how far it is, how long it takes, how much memory it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

Tell = Callable[[str, int, int], None]
"""What is being done, how much of it (bytes or comparisons), of how much."""

SAMPLE_S = 0.02
STATUS = Path("/proc/self/status")


def quiet(what: str, done: int, total: int) -> None:
    """For nobody."""


class PeakMemory:
    """The largest growth of this process's own memory (files' pages left out) while it is open."""

    def __init__(self) -> None:
        self._ended, self._before = threading.Event(), own_memory()
        self._largest = self._before
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    @property
    def bytes(self) -> int | None:
        """None where the system does not tell."""
        return None if self._largest is None or self._before is None else self._largest - self._before

    def _watch(self) -> None:
        while self._before is not None and not self._ended.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        self._largest = max(self._largest or 0, own_memory() or 0)


def own_memory() -> int | None:
    """Bytes of this process's memory that no file backs; None where the system has no /proc."""
    if not STATUS.is_file():
        return None
    return 1024 * int(STATUS.read_text().partition("RssAnon:")[2].split()[0])


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's copies on one thread: the disk sets the pace, and on cores that others use several threads wait for each
    other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
