"""Turns samples into the micro-batches of one data-parallel rank.

A step takes the samples [consumed, consumed + global_batch_size). Rank r of the data-parallel axis takes the
r-th contiguous slice of them and cuts it into micro-batches, so the samples of a step are the same on every
layout; every rank computes its own, nothing is communicated. B = micro_batch_size, S = sequence_length.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.dataset import PackedSamples
from data_pipeline.errors import DataError

IGNORED_TARGET = -100  # the value that cross-entropy leaves out


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of a data-parallel rank."""

    tokens: NDArray[np.int64]  # [B, S]
    targets: NDArray[np.int64]  # [B, S]; IGNORED_TARGET at the end of a document, with document_mask
    positions: NDArray[np.int64] | None  # [B, S]; None without document_mask: 0 ... S - 1
    samples: NDArray[np.int64]  # [B] numbers in the run's order; a sample seen again in another epoch has another one


@dataclass(frozen=True)
class BatchPlan:
    """The division of an optimizer step's samples among data-parallel ranks and micro-batches.

    Raises DataError if the global batch cannot be divided evenly.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    document_mask: bool  # attention stops at document boundaries

    def __post_init__(self) -> None:
        whole, micro, size = self.global_batch_size, self.micro_batch_size, self.data_parallel_size
        if min(whole, micro, size) < 1 or whole % (micro * size):
            raise DataError(
                f"a global batch of {whole} samples cannot be divided into micro-batches of {micro} on {size} "
                "data-parallel ranks: make it a positive multiple of micro_batch_size x data_parallel_size"
            )
        assert 0 <= self.data_parallel_rank < size, f"data-parallel rank {self.data_parallel_rank} outside [0, {size})"


def global_batch(samples: PackedSamples, plan: BatchPlan, consumed_samples: int) -> list[TokenBatch]:
    """Returns the micro-batches of this rank in the step after `consumed_samples` samples."""
    share = plan.global_batch_size // plan.data_parallel_size
    first = consumed_samples + plan.data_parallel_rank * share
    return [
        _micro_batch(samples, start, plan.micro_batch_size, plan.document_mask)
        for start in range(first, first + share, plan.micro_batch_size)
    ]


def _micro_batch(samples: PackedSamples, first: int, size: int, document_mask: bool) -> TokenBatch:
    numbers = np.arange(first, first + size)
    chosen = [samples.sample(k) for k in numbers.tolist()]
    tokens = np.stack([sample.tokens for sample in chosen])  # [B, S + 1]
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # copies: targets are written to below
    if not document_mask:
        return TokenBatch(inputs, targets, None, numbers)
    targets[~np.stack([sample.target_is_valid for sample in chosen])] = IGNORED_TARGET
    return TokenBatch(inputs, targets, np.stack([sample.positions for sample in chosen]), numbers)


class BatchStream:
    """The global batches of `steps` steps; a thread prepares the next ones while the current one trains.

    An exception in the thread is raised at the step that it belongs to. Use the stream as a context manager, or close
    it.
    """

    _AHEAD = 2  # steps prepared at most

    def __init__(self, samples: PackedSamples, plan: BatchPlan, *, start_consumed: int, steps: int) -> None:
        self._samples, self._plan = samples, plan
        end = start_consumed + steps * plan.global_batch_size
        self._consumed = iter(range(start_consumed, end, plan.global_batch_size))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._waiting: deque[Future[list[TokenBatch]]] = deque()
        self._closed = False
        for _ in range(self._AHEAD):
            self._submit_next()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[TokenBatch]:
        if not self._waiting:
            self.close()
            raise StopIteration
        try:
            batch = self._waiting.popleft().result()
        except BaseException:
            self.close()
            raise
        self._submit_next()
        return batch

    def close(self) -> None:
        """Stops the thread and drops what it has prepared. May be called more than once."""
        self._closed = True
        self._waiting.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit_next(self) -> None:
        consumed = next(self._consumed, None)
        if consumed is not None and not self._closed:
            self._waiting.append(self._thread.submit(global_batch, self._samples, self._plan, consumed))
