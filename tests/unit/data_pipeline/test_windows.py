"""Windows over documents: every token predicted once, with the context that transformers' guide gives it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.loader import IGNORED_TARGET, document_windows, equally_long_batches


def contexts_of_the_guide(length: int, stride: int, tokens: int) -> list[tuple[int, int]]:
    """(place of a token that counts, tokens before it that its window holds), by the loop of transformers' guide to
    perplexity of fixed-length models; its `max_length` counts the last target, so it is one more than ours."""
    counted, previous_end = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + length + 1, tokens)
        labels = range(max(begin + 1, previous_end), end)  # the first of a window is shifted away
        counted += [(place, place - begin) for place in labels]
        previous_end = end
        if end == tokens:
            break
    return counted


@given(tokens=st.integers(0, 60), length=st.integers(1, 20), data=st.data())
def test_each_token_but_the_first_is_predicted_once_with_the_guides_context(
    tokens: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    document, seen = np.arange(100, 100 + tokens), []
    for window in document_windows(document, length, stride):
        assert 1 <= len(window.tokens) <= length
        for place in np.flatnonzero(window.targets != IGNORED_TARGET):
            assert window.targets[place] == window.tokens[place] + 1, "what follows it"
            seen.append((int(window.targets[place]) - 100, int(place) + 1))
    assert seen == contexts_of_the_guide(length, stride, tokens)
    assert [place for place, _ in seen] == list(range(1, tokens))


@given(st.lists(st.integers(2, 30), max_size=12), st.integers(1, 64))
def test_batches_hold_all_windows_of_one_length_each(lengths: list[int], most: int) -> None:
    documents = [np.arange(100 * number, 100 * number + length) for number, length in enumerate(lengths)]
    windows = [window for document in documents for window in document_windows(document, 9, 5)]
    batches = list(equally_long_batches(windows, most))
    assert all(batch.tokens.shape == batch.targets.shape for batch in batches)
    assert all(batch.tokens.size <= most or len(batch.tokens) == 1 for batch in batches)
    rows = sorted(row.tolist() for batch in batches for row in np.stack((batch.tokens, batch.targets), 1))
    assert rows == sorted(np.stack((window.tokens, window.targets)).tolist() for window in windows)
