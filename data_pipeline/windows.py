"""Documents of any length as windows that a model can read, so that each token is predicted once.

A document t[0] ... t[T-1] has T - 1 tokens to predict: the first one has no context. A window reads up to `length`
tokens and predicts what follows each; windows begin `stride` tokens apart, and a token that two of them could predict
counts in the earlier one. So behind the first window every prediction sees at least `length - stride` + 1 tokens: the
sliding window of transformers' guide to perplexity, whose `max_length` counts the last target too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.batches import IGNORED_TARGET


@dataclass(frozen=True)
class Window:
    """A row or, batched, rows."""

    tokens: NDArray[np.int64]  # [..., n] what the model reads, n <= length
    targets: NDArray[np.int64]  # [..., n] what follows each; IGNORED_TARGET where an earlier window has counted it


def document_windows(tokens: NDArray[np.int64], length: int, stride: int) -> Iterator[Window]:
    """The windows of one document `[T]`; none where T < 2. 1 <= stride <= length."""
    last, counted = len(tokens) - 1, 0
    for begin in range(0, last, stride):
        end = min(begin + length, last)
        targets = tokens[begin + 1 : end + 1].copy()
        targets[: max(0, counted - begin)] = IGNORED_TARGET
        yield Window(tokens[begin:end], targets)
        if end == last:
            return
        counted = end


def equally_long_batches(windows: Iterable[Window], most_tokens: int) -> Iterator[Window]:
    """The windows in rows `[batch, n]` of up to `most_tokens` tokens, but at least one row.

    Only windows of the same length share a batch: there is no padding that could change a number. Order is lost.
    """
    waiting: dict[int, list[Window]] = {}
    for window in windows:
        alike = waiting.setdefault(len(window.tokens), [])
        alike.append(window)
        if (len(alike) + 1) * len(window.tokens) > most_tokens:
            yield _stacked(alike)
            alike.clear()
    for alike in waiting.values():
        if alike:
            yield _stacked(alike)


def _stacked(windows: list[Window]) -> Window:
    return Window(np.stack([w.tokens for w in windows]), np.stack([w.targets for w in windows]))
