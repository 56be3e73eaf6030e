"""Best-fit packing places every piece once, as the plain algorithm does, and a plan is used for its own data only."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import data_pipeline.samples.packing_plan as packing_plan
from data_pipeline.errors import DataError
from data_pipeline.samples.packing_plan import PackingPlan, PackingRequest, best_fit_bins, write_plan
from data_pipeline.storage.indexed import IndexedTokens


def plain_best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """One piece after another, each compared with every bin; returns the pieces of each bin."""
    bins: list[list[int]] = []
    free: list[int] = []
    filled_at: list[int] = []  # when the bin got as full as it is
    for moment, piece in enumerate(sorted(range(len(sizes)), key=lambda i: -sizes[i])):
        fitting = [place for place in range(len(bins)) if free[place] >= sizes[piece]]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            free.append(capacity)
            filled_at.append(moment)
        chosen = min(fitting, key=lambda place: (free[place], filled_at[place]))
        bins[chosen].append(piece)
        free[chosen] -= sizes[piece]
        filled_at[chosen] = moment
    return bins


def packed(sizes: NDArray[np.int64], capacity: int) -> list[list[int]]:
    order, edges = best_fit_bins(sizes, capacity)
    return [part.tolist() for part in np.split(order, edges[1:-1])] if len(sizes) else []


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 40), count=st.integers(0, 400), skew=st.floats(0.3, 4))
def test_groups_are_placed_as_single_pieces_would_be(seed: int, capacity: int, count: int, skew: float) -> None:
    sizes = 1 + (capacity * np.random.default_rng(seed).random(count) ** skew).astype(np.int64)
    assert packed(sizes, capacity) == plain_best_fit(sizes.tolist(), capacity)


CAPACITY = 1025
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator], NDArray[np.float64]], float]] = {
    "web pages": (lambda draw: draw.lognormal(np.log(400), 1.2, 20_000), 0.999),
    "code files": (lambda draw: draw.lognormal(np.log(900), 1.5, 20_000), 0.999),
    "chats": (lambda draw: draw.gamma(2.0, 150.0, 20_000), 0.999),
    "heavy tail": (lambda draw: 20 * (draw.pareto(1.1, 20_000)), 0.999),
    "short": (lambda draw: draw.geometric(0.1, 20_000), 0.999),
    "up to half a sample": (lambda draw: draw.uniform(1, CAPACITY // 2, 20_000), 0.999),
    "two kinds": (lambda draw: draw.choice([5, 800], 20_000, p=[0.98, 0.02]), 0.999),
    "all longer than a sample": (lambda draw: draw.uniform(CAPACITY + 1, 9 * CAPACITY, 5_000), 0.98),
    "all of one token": (lambda draw: np.ones(20_000), 0.999),
    "just over half a sample": (lambda draw: np.full(5_000, CAPACITY // 2 + 1), 513 / 1025 - 1e-6),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_pieces_of_any_lengths_are_placed_once_and_fill_the_samples(name: str, tmp_path: Path) -> None:
    """The same bins as the plain algorithm's for a part of them; 0.999 where short documents fill what is left."""
    make, least = DISTRIBUTIONS[name]
    draw = np.random.default_rng()
    documents = np.maximum(1, make(draw)).astype(np.int64)
    pieces = [min(CAPACITY, int(n) - at) for n in documents for at in range(0, max(1, int(n) - 1), CAPACITY - 1)]
    sizes = np.array(pieces, dtype=np.int64)
    order, edges = best_fit_bins(sizes, CAPACITY)
    assert np.array_equal(np.sort(order), np.arange(len(sizes)))
    held = np.add.reduceat(sizes[order], edges[:-1])
    assert int(held.max()) <= CAPACITY and int(np.diff(edges).min()) >= 1
    assert len(held) <= sizes.sum() / (CAPACITY * least) + 1  # the last sample may be less full
    few = draw.choice(sizes, 300)
    assert packed(few, CAPACITY) == plain_best_fit(few.tolist(), CAPACITY)


def request(prefix: Path, **changes: object) -> PackingRequest:
    corpus = IndexedTokens(prefix)
    facts = {"sequence_length": 8, "split": "train", "held_out_fraction": 0.0, **changes}
    return PackingRequest(corpus, corpus.index_digest(), **facts)  # type: ignore[arg-type]


def test_a_plan_that_is_missing_stale_or_damaged_is_one_sentence(
    write_corpus: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    prefix = write_corpus(documents)
    wanted = request(prefix)
    assert wanted.path.name == "corpus.pack-8-train-0.0.npy"
    with pytest.raises(
        DataError, match=r"no plan of best-fit packing for the train split with sequence_length 8 .*pack"
    ):
        PackingPlan(wanted)
    write_plan(wanted)
    write_corpus([*documents[:2], [6, 7, 8], [9]])  # as many tokens, at the same place
    with pytest.raises(DataError, match=r"was written for another index than .*corpus.idx.*`megalite data pack"):
        PackingPlan(request(prefix))
    write_corpus(documents)
    assert PackingPlan(request(prefix)).bin_count == 1
    monkeypatch.setattr(packing_plan, "RULE", "best-fit-2")
    with pytest.raises(DataError, match="another version of megalite"):
        PackingPlan(wanted)
    monkeypatch.undo()
    whole = wanted.path.read_bytes()
    for content, says in {b"": "not readable", b"no plan": "not readable", whole[:-8]: "cut off"}.items():
        wanted.path.write_bytes(content)
        with pytest.raises(DataError, match=says):
            PackingPlan(wanted)


def test_a_corpus_that_the_plan_cannot_number_is_refused(
    write_corpus: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first token beyond its bits would silently become another one's."""
    wanted = request(write_corpus([[1, 2, 3]]))
    monkeypatch.setattr(packing_plan, "_MOST_TOKENS", 2)
    with pytest.raises(DataError, match=r"corpus \(3 tokens.*prepare it as several corpora of at most 2 tokens"):
        write_plan(wanted)
