"""Turns samples into the micro-batches of one data-parallel rank.

A step takes the samples [consumed, consumed + global_batch_size). Rank r of the data-parallel axis takes the
r-th contiguous slice of them and cuts it into micro-batches, so the samples of a step are the same on every
layout; every rank computes its own, nothing is communicated. B = micro_batch_size, S = sequence_length.
"""

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.samples.dataset import SampleRows, ids_are_below
from data_pipeline.samples.samples import ReadSamples

IGNORED_TARGET = -100  # the value that cross-entropy leaves out
_STEPS_AHEAD = 2  # global batches that are prepared while one trains
_MOST_AHEAD, _TOKENS_AHEAD = 16, 1 << 14  # of small ones so many together, for which waking the thread takes longer


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of a data-parallel rank."""

    tokens: NDArray[np.int64]  # [B, S]
    targets: NDArray[np.int64]  # [B, S]; IGNORED_TARGET at the end of a document, with document_mask, and without loss
    positions: NDArray[np.int64] | None  # [B, S]; None without document_mask: 0 ... S - 1
    samples: NDArray[np.int64]  # [B] numbers in the run's order; a sample seen again in another epoch has another one
    global_valid_targets: int  # of the global batch, on all replicas: targets that are not IGNORED_TARGET
    sources: NDArray[np.int64] | None = None  # [B] of a mix: the place of each row's source among the sorted names


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


def global_batch(samples: ReadSamples, plan: BatchPlan, consumed_samples: int) -> list[TokenBatch]:
    """Returns the micro-batches of this rank in the step after `consumed_samples` samples."""
    share = plan.global_batch_size // plan.data_parallel_size
    first = consumed_samples + plan.data_parallel_rank * share
    valid = count_valid_targets(samples, plan, consumed_samples)
    return [_micro_batch(samples, start, plan, valid) for start in range(first, first + share, plan.micro_batch_size)]


def count_valid_targets(samples: ReadSamples, plan: BatchPlan, consumed_samples: int) -> int:
    """Returns how many targets of the global batch after `consumed_samples` samples count, on all replicas."""
    if not (plan.document_mask or samples.has_loss_mask):
        return plan.global_batch_size * samples.sequence_length
    stop = consumed_samples + plan.global_batch_size  # from indexes and loss masks: no replica has to ask the others
    return samples.count_valid_targets_between(consumed_samples, stop)


def _micro_batch(samples: ReadSamples, first: int, plan: BatchPlan, valid: int) -> TokenBatch:
    numbers = np.arange(first, first + plan.micro_batch_size)
    rows = SampleRows(len(numbers), samples.sequence_length, samples.dtype, finds_starts=plan.document_mask)
    for row, k in enumerate(numbers.tolist()):
        samples.read_row(k, rows, row)
    if not ids_are_below(samples.id_limit, rows.tokens):
        for k in numbers.tolist():
            samples.sample(k)  # raises an error for the one with the id
    tokens, targets = rows.tokens[:, :-1].astype(np.int64), rows.tokens[:, 1:].astype(np.int64)
    for places in rows.without_loss:
        targets.reshape(-1)[places] = IGNORED_TARGET
    positions = _mask_documents(targets, rows.document_starts()) if plan.document_mask else None
    return TokenBatch(tokens, targets, positions, numbers, valid, samples.sources_of(numbers))


def _mask_documents(targets: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Leaves out the targets [B, S] that begin documents; returns the positions [B, S].

    A document that begins at place s of row r is in `starts` as r S + s, 1 <= s <= S.
    """
    targets.reshape(-1)[starts - 1] = IGNORED_TARGET
    rows, length = targets.shape
    edges = np.concatenate((np.arange(0, targets.size + 1, length), starts))  # a row begins like a document
    edges.sort()
    begins = edges[:-1].repeat(edges[1:] - edges[:-1])  # of each token's document
    return (_first_numbers(targets.size) - begins).reshape(rows, length)


@lru_cache(maxsize=2)
def _first_numbers(count: int) -> NDArray[np.int64]:
    return np.arange(count)


def prefetched_batches(
    samples: ReadSamples, plan: BatchPlan, *, start_consumed: int, steps: int
) -> Generator[list[TokenBatch], None, None]:
    """Yields the global batches of `steps` steps; a thread prepares the next ones while the current one trains.

    An exception in the thread is raised at the step that it belongs to. Closing the generator ends the thread.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
    waiting: deque[Future[list[TokenBatch]]] = deque()
    positions = iter(range(start_consumed, start_consumed + steps * plan.global_batch_size, plan.global_batch_size))
    ahead = max(_STEPS_AHEAD, min(_MOST_AHEAD, _TOKENS_AHEAD // (samples.sequence_length * plan.global_batch_size)))
    try:
        for _ in range(steps):
            if len(waiting) <= _STEPS_AHEAD:
                for consumed in islice(positions, ahead + 1 - len(waiting)):
                    waiting.append(thread.submit(global_batch, samples, plan, consumed))
            yield waiting.popleft().result()
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
