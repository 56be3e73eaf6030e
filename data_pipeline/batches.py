"""From samples to the micro-batches of one data-parallel coordinate.

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

from data_pipeline.errors import DataError
from data_pipeline.samples import PackedSamples

IGNORED_TARGET = -100  # the value that cross-entropy leaves out


@dataclass(frozen=True)
class MicroBatch:
    tokens: NDArray[np.int64]  # [B, S]
    targets: NDArray[np.int64]  # [B, S]; IGNORED_TARGET at the end of a document, with document_mask
    positions: NDArray[np.int64] | None  # [B, S]; None without document_mask: 0 ... S - 1
    samples: NDArray[np.int64]  # [B] numbers in the run's order, over all epochs: a sample seen again has another one


def global_batch(
    samples: PackedSamples,
    *,
    consumed_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    document_mask: bool,
) -> list[MicroBatch]:
    """The micro-batches that `data_parallel_rank` runs in the step after `consumed_samples` samples."""
    _check_division(global_batch_size, micro_batch_size, data_parallel_rank, data_parallel_size)
    share = global_batch_size // data_parallel_size
    first = consumed_samples + data_parallel_rank * share
    return [
        _micro_batch(samples, start, micro_batch_size, document_mask)
        for start in range(first, first + share, micro_batch_size)
    ]


class BatchStream:
    """The global batches of the coming steps; a thread prepares the next ones while the current one trains.

    An exception in the thread is raised where its step would have come out. Use it as a context manager, or
    close it.
    """

    _AHEAD = 2  # steps prepared at most

    def __init__(
        self,
        samples: PackedSamples,
        *,
        start_consumed: int,
        steps: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        document_mask: bool,
    ) -> None:
        _check_division(global_batch_size, micro_batch_size, data_parallel_rank, data_parallel_size)

        def prepared(step: int) -> list[MicroBatch]:
            return global_batch(
                samples,
                consumed_samples=start_consumed + step * global_batch_size,
                global_batch_size=global_batch_size,
                micro_batch_size=micro_batch_size,
                data_parallel_rank=data_parallel_rank,
                data_parallel_size=data_parallel_size,
                document_mask=document_mask,
            )

        self._prepared, self._coming = prepared, iter(range(steps))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._waiting: deque[Future[list[MicroBatch]]] = deque()
        self._closed = False
        for _ in range(self._AHEAD):
            self._order_next()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[MicroBatch]:
        if not self._waiting:
            self.close()
            raise StopIteration
        try:
            batch = self._waiting.popleft().result()
        except BaseException:
            self.close()
            raise
        self._order_next()
        return batch

    def close(self) -> None:
        """Stop preparing; what is prepared is dropped. Closing twice is fine."""
        self._closed = True
        self._waiting.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _order_next(self) -> None:
        step = next(self._coming, None)
        if step is not None and not self._closed:
            self._waiting.append(self._thread.submit(self._prepared, step))


def prefetched(
    samples: PackedSamples,
    *,
    start_consumed: int,
    steps: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    document_mask: bool,
) -> BatchStream:
    """`global_batch` of `steps` steps from `start_consumed` samples on, prepared ahead by a thread."""
    return BatchStream(
        samples,
        start_consumed=start_consumed,
        steps=steps,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        document_mask=document_mask,
    )


def _micro_batch(samples: PackedSamples, first: int, size: int, document_mask: bool) -> MicroBatch:
    numbers = np.arange(first, first + size)
    chosen = [samples.sample(k) for k in numbers.tolist()]
    tokens = np.stack([sample.tokens for sample in chosen])  # [B, S + 1]
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # copies: targets are written to below
    if not document_mask:
        return MicroBatch(inputs, targets, None, numbers)
    targets[~np.stack([sample.target_is_valid for sample in chosen])] = IGNORED_TARGET
    return MicroBatch(inputs, targets, np.stack([sample.positions for sample in chosen]), numbers)


def _check_division(global_batch_size: int, micro_batch_size: int, rank: int, size: int) -> None:
    if min(global_batch_size, micro_batch_size, size) < 1 or global_batch_size % (micro_batch_size * size):
        raise DataError(
            f"a global batch of {global_batch_size} samples cannot be divided into micro-batches of "
            f"{micro_batch_size} on "
            f"{size} data-parallel ranks: make it a positive multiple of micro_batch_size x "
            "data_parallel_size"
        )
    assert 0 <= rank < size, f"data-parallel rank {rank} outside [0, {size})"
