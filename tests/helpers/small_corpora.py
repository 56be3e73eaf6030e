"""Small corpora as hypothesis draws them, for tests of packings."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from data_pipeline.samples.token_stream import Split


class SmallCorpora(NamedTuple):
    """The lengths of the documents of some corpora, and how they are made samples."""

    corpora: list[list[int]]
    sequence_length: int
    seed: int
    fraction: float  # of documents that are held out
    split: Split


SMALL_CORPORA = st.builds(
    SmallCorpora,
    corpora=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=30), min_size=1, max_size=3),
    sequence_length=st.integers(1, 70),
    seed=st.integers(0, 1000),
    fraction=st.sampled_from([0.0, 0.3]),
    split=st.sampled_from(["train", "held_out"]),
)
