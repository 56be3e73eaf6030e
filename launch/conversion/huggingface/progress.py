"""Plans and summaries of conversions, and the measurement of progress and memory while one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class ConversionEnds:
    """The two sides of a conversion."""

    source: str
    target: str
    model_type: str
    tensors: int | None  # on the Hugging Face side; None if they are not downloaded yet
    parameters: int
    dtype: str  # of the Hugging Face side
    bytes_read: int  # of weights
    bytes_written: int
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConversionPlan(ConversionEnds):
    """Describes a conversion before it is made."""

    files: tuple[str, ...]  # with weights, on the Hugging Face side
    bytes_free: int  # where the target is going to be


@dataclass(frozen=True, kw_only=True)
class ConvertSummary(ConversionEnds):
    """Describes a finished conversion: its cost, and the difference between our logits and those of transformers."""

    logit_difference: float | None  # largest, over the logits' standard deviation; None without validation
    compared: tuple[str, ...]  # the comparisons made, a phrase each
    seconds: float  # of reading and writing; validation has its own
    validation_seconds: float
    peak_memory_bytes: int | None  # of reading and writing, beyond what the process held before; None: unknown here


ReportProgress = Callable[[str, int, int], None]
"""Receives the name of an activity, how much of it is done (bytes or comparisons), and of how much."""

SAMPLE_S = 0.02
STATUS = Path("/proc/self/status")


def no_progress(what: str, done: int, total: int) -> None:
    """Ignores progress."""


class PeakMemory:
    """Measures the largest growth of this process's own memory (without pages of files) inside a `with` block."""

    bytes: int | None = None  # None where the system does not report it

    def __enter__(self) -> PeakMemory:
        self._ended, self._before = threading.Event(), own_memory()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._before is not None:
            is_last = self._ended.wait(SAMPLE_S)
            self.bytes = max(self.bytes or 0, (own_memory() or 0) - self._before)
            if is_last:
                return


def own_memory() -> int | None:
    """Returns the bytes of this process's memory that no file backs; None where the system has no /proc."""
    if not STATUS.is_file():
        return None
    return 1024 * int(STATUS.read_text().partition("RssAnon:")[2].split()[0])


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: the disk is the bottleneck, and on busy cores several threads mostly wait for each
    other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
