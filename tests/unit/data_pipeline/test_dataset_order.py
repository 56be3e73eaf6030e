"""The computed permutation is a bijection for every size, the same on every machine, and well mixed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.samples.order import RoundKeys, epoch_key, permuted_range


def permuted_index(index: int, size: int, key: RoundKeys) -> int:
    (image,) = permuted_range(index, index + 1, size, key)
    return image


def permutation(size: int, key: RoundKeys) -> list[int]:
    return permuted_range(0, size, size, key)


@settings(max_examples=80)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_size_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    key = epoch_key(seed, epoch, "fingerprint")
    assert sorted(permutation(size, key)) == list(range(size))


@settings(max_examples=40)
@given(size=st.integers(1, 2**62), seed=st.integers(0, 2**64), data=st.data())
def test_images_lie_inside_at_any_size(size: int, seed: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    assert 0 <= permuted_index(index, size, epoch_key(seed, 3, "f")) < size


@settings(max_examples=100)
@given(size=st.one_of(st.integers(1, 300), st.integers(1, 2**62)), seed=st.integers(0, 2**40), data=st.data())
def test_many_indexes_at_once_have_the_images_of_each(size: int, seed: int, data: st.DataObject) -> None:
    """Sizes just above a power of two send half of the numbers through the network again, and some many times."""
    size = data.draw(st.sampled_from([size, 2 ** (size.bit_length() - 1) + 1]))
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, min(size, first + 300)))
    key = epoch_key(seed, 1, "f")
    assert permuted_range(first, stop, size, key) == [permuted_index(index, size, key) for index in range(first, stop)]


def test_the_order_is_pinned() -> None:
    """Resuming a run with a newer version must give the same batches: these numbers may never change."""
    key = epoch_key(1234, 0, "abc")
    assert [permuted_index(i, 1000, key) for i in range(6)] == [332, 303, 159, 132, 596, 791]
    assert permuted_range(0, 6, 1000, key) == [332, 303, 159, 132, 596, 791]


def test_seed_epoch_and_data_each_change_the_order() -> None:
    keys = [epoch_key(1, 0, "a"), epoch_key(2, 0, "a"), epoch_key(1, 1, "a"), epoch_key(1, 0, "b")]
    orders = {tuple(permutation(100, key)) for key in keys}
    assert len(orders) == 4


def test_every_place_is_reached_from_every_index_equally_often() -> None:
    """A weak round function shows as a skew: 40 x 40 counts of 1500 keys, chi-squared within 6 sigma of its mean."""
    size, keys = 40, 1500
    counts = np.zeros((size, size))
    for seed in range(keys):
        counts[np.arange(size), permutation(size, epoch_key(seed, 0, "x"))] += 1
    expected = keys / size
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    freedom = (size - 1) ** 2
    assert abs(chi_squared - freedom) < 6 * np.sqrt(2 * freedom)
