"""Cuts whole documents into windows, in which every token is scored once, for evaluation.

Each token is predicted once. A document t[0] ... t[T-1] has T - 1 tokens to predict: the first one has no context. A
window reads up to `length` tokens and predicts the token after each; windows begin `stride` tokens apart, and a token
that two of them could predict counts in the earlier one. So after the first window every prediction sees at least
`length - stride` + 1 tokens. This is the sliding window of transformers' guide to perplexity, whose `max_length` counts
the last target too.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.loader import IGNORED_TARGET


@dataclass(frozen=True)
class Window:
    """One window, or a batch of windows of equal length."""

    tokens: NDArray[np.int64]  # [..., n] input of the model, n <= length
    targets: NDArray[np.int64]  # [..., n] the next tokens; IGNORED_TARGET if an earlier window has counted them


def document_windows(tokens: NDArray[np.int64], length: int, stride: int) -> Iterator[Window]:
    """Yields the windows of one document `[T]`, none if T < 2; 1 <= stride <= length."""
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
    """Groups windows into batches `[batch, n]` of at most `most_tokens` tokens, or of a single window.

    Only windows of the same length share a batch, so that no padding can change a number. The order is not kept.
    """
    by_length: dict[int, list[Window]] = {}
    for window in windows:
        group = by_length.setdefault(len(window.tokens), [])
        group.append(window)
        if (len(group) + 1) * len(window.tokens) > most_tokens:
            yield _stacked(by_length.pop(len(window.tokens)))
    yield from map(_stacked, by_length.values())


def _stacked(windows: list[Window]) -> Window:
    return Window(np.stack([w.tokens for w in windows]), np.stack([w.targets for w in windows]))
