"""A mix is a function of the sample's number: its counts follow the weights, and nothing is read twice or left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.loader import BatchPlan, global_batch
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.mix import MODULUS, Mix, MixedSamples, MixRecord, MixStage, floor_sum
from tests.helpers.sample_views import target_is_valid
from tests.unit.data_pipeline.samples.test_dataset import numbered_documents

NAMES = ("books", "code", "math", "web")
WEIGHTS = st.lists(st.sampled_from([0, 0.1, 0.25, 1, 3, 1e-3, 17.5]), min_size=4, max_size=4).filter(any)
STAGES = st.lists(st.tuples(st.integers(1, 400), WEIGHTS), max_size=3, unique_by=lambda stage: stage[0])


def weighted(values: list[float]) -> dict[str, float]:
    return dict(zip(NAMES, values, strict=True))


def mix_of(first: list[float], later: list[tuple[int, list[float]]] = []) -> Mix:  # noqa: B006
    stages = [MixStage(0, weighted(first)), *(MixStage(at, weighted(values)) for at, values in sorted(later))]
    return Mix.by_weights(NAMES, stages)


def source_by_hand(mix: Mix, k: int) -> int:
    """The definition, in fractions: the golden rotation, and the interval of the stage's weights that it lies in."""
    weights = [stage.weights for stage in mix.stages if stage.first_sample <= k][-1]
    place = Fraction(0x9E3779B97F4A7C15 * k % 2**64, 2**64)
    total, end = sum(Fraction(str(weights[name])) for name in NAMES), Fraction(0)
    for number, name in enumerate(NAMES):
        end += Fraction(str(weights[name])) / total
        if place < end:
            return number
    raise AssertionError


@given(first=WEIGHTS, later=STAGES)
def test_places_are_those_of_a_walk_through_all_samples(first: list[float], later: Any) -> None:
    """Over changes of stages too: each source's numbers go on without a gap or a repeat (T3), whoever asks."""
    mix = mix_of(first, later)
    taken = [0] * len(NAMES)
    for k, place in enumerate(mix.places(0, 450)):
        source = source_by_hand(mix, k)
        assert place == (source, taken[source])
        if k % 11 == 0:
            assert mix.place(k) == place and mix.counts(k) == taken and mix.sample_of(*place) == k
        taken[source] += 1
    never = [number for number, count in enumerate(taken) if not mix.stages[-1].weights[NAMES[number]]]
    assert all(mix.sample_of(number, taken[number]) is None for number in never)


@settings(max_examples=40)
@given(first=WEIGHTS, later=STAGES, begin=st.integers(0, 10**15), cuts=st.lists(st.integers(1, 60), max_size=6))
def test_a_walk_in_pieces_is_that_from_the_start(first: list[float], later: Any, begin: int, cuts: list[int]) -> None:
    """Blocks behind each other take the sources' numbers over; near 2^64 the numbers of numpy wrap like the rotation.

    A source without weight ends where the modulus does, which 64 bits do not hold.
    """
    by_samples = Mix.by_samples({name: 1 + int(1e6 * weight) for name, weight in weighted(first).items()})
    for mix in (mix_of(first, [(at + begin, weights) for at, weights in later]), by_samples):
        following, k, walked = mix.nothing_known(), begin, []
        for count in cuts:
            walked += mix.places(k, k + count, following)
            k += count
        assert walked == [mix.place(number) for number in range(begin, k)]
        assert all(j in (-1, expected) for j, expected in zip(following.tolist(), mix.counts(k), strict=True))


def test_samples_of_a_mix_are_the_same_in_any_order(sources: dict[str, PackedSamples]) -> None:
    """What is known of the block read last must serve the next one only."""
    stages = [MixStage(0, {"books": 1, "code": 2, "web": 3}), MixStage(900, {"books": 3, "code": 1})]
    numbers = [0, 300, 256, 1000, 511, 512, 40, 768, 1023, 1024, 255, 5000]
    samples = mixed(sources, stages)
    for k in numbers:
        source, j = samples.mix.place(k)
        expected = sources[samples.mix.names[source]].sample(j)
        assert samples.sample(k).tokens.tolist() == expected.tokens.tolist(), k


@settings(max_examples=20)
@given(first=WEIGHTS, after=WEIGHTS, data=st.data())
def test_counts_stay_near_the_weights_in_a_billion_samples(first: list[float], after: list[float], data: Any) -> None:
    """Within 8 of n x weight in any prefix of a stage, also of a stage that begins late."""
    change = data.draw(st.integers(1, 10**9))
    mix = mix_of(first, [(change, after)])
    for _ in range(10):
        n = data.draw(st.integers(0, 10**9))
        for weights, begin, end in ((first, 0, min(n, change)), (after, change, change + n)):
            counts = np.array(mix.counts(end)) - mix.counts(begin)
            assert np.abs(counts - (end - begin) * np.array(weights) / sum(weights)).max() < 8, (begin, end, counts)


def test_order_and_scale_of_weights_mean_nothing() -> None:
    one = Mix.by_weights(["b", "a"], [MixStage(0, {"b": 0.3, "a": 0.7})])
    other = Mix.by_weights(["a", "b"], [MixStage(0, {"a": 7, "b": 3})])
    assert one.places(0, 300) == other.places(0, 300)


def test_a_mix_is_pinned() -> None:
    """Resuming a run with a newer version must give the same batches: these numbers may never change."""
    mix = mix_of([0.1, 0.2, 0, 0.7], [(6, [0, 0, 1, 1])])
    assert "".join(NAMES[source][0] for source, _ in mix.places(0, 12)) == "bwcwwbwmwwmw"
    assert [mix.place(k) for k in (5, 6, 123_456_789, 10**15)] == [
        (0, 1),
        (3, 3),
        (3, 61_728_396),
        (3, 500_000_000_000_027),
    ]


@given(samples=st.lists(st.integers(1, 60), min_size=1, max_size=4), rounds=st.integers(1, 3))
def test_by_samples_every_source_is_read_exactly_so_often(samples: list[int], rounds: int) -> None:
    mix = Mix.by_samples(dict(zip(NAMES, samples, strict=False)))
    whole = sum(samples)
    assert mix.counts(rounds * whole) == [rounds * count for count in samples]
    walked = mix.places(0, rounds * whole)
    for number, count in enumerate(samples):
        assert [j for source, j in walked if source == number] == list(range(rounds * count))
    middle = np.array(mix.counts(whole // 2)) - whole // 2 * np.array(samples) / whole
    assert np.abs(middle).max() < 8, "sources come in turn, not one after the other"  # 4.0 was met by chance


@given(n=st.integers(0, 40), m=st.integers(1, 50), a=st.integers(0, 90), b=st.integers(0, 90))
def test_floor_sums(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@settings(max_examples=60)
@given(
    first=WEIGHTS, second=WEIGHTS, ours=STAGES, theirs=STAGES, same=st.integers(0, 400), by_samples=st.booleans(),
    stop=st.integers(1, 500),
)  # fmt: skip
def test_the_first_difference_is_that_of_a_comparison_of_all_samples(
    first: list[float], second: list[float], ours: Any, theirs: Any, same: int, by_samples: bool, stop: int
) -> None:
    """T4: a stage added or changed in the future is none; the past is compared source by source and content."""
    shared = [stage for stage in ours if stage[0] < same]
    one = mix_of(first, ours)
    other = mix_of(first, shared + [stage for stage in theirs if stage[0] >= same])
    if by_samples:
        other = Mix.by_samples({name: round(10 * weight) + 1 for name, weight in weighted(second).items()})
    contents = {name: f"content of {name}" for name in NAMES}
    changed = contents | {"math": "another"} if same % 2 else contents
    read = [
        [(NAMES[source], content[NAMES[source]]) for source, _ in mix.places(0, stop)]
        for mix, content in ((one, contents), (other, changed))
    ]
    expected = next((k for k, (was, now) in enumerate(zip(*read, strict=True)) if was != now), None)
    assert MixRecord(one, contents).first_difference(MixRecord(other, changed), stop) == expected


def test_one_text_becomes_a_source_of_a_mix_and_the_other_way_round() -> None:
    text = MixRecord.of_one("content of web")
    contents = {"new": "content of new", "web": "content of web"}
    stages = [MixStage(0, {"web": 2}), MixStage(100, {"web": 1, "new": 1})]
    mixed = MixRecord(Mix.by_weights(["web", "new"], stages), contents)
    for one, other in ((text, mixed), (mixed, text)):
        assert one.first_difference(other, 100) is None
        assert one.first_difference(other, 200) in range(100, 110)
    assert text.first_difference(MixRecord.of_one("content of math"), 100) == 0


@given(first=WEIGHTS, later=STAGES)
def test_a_record_reads_back_what_it_wrote(first: list[float], later: Any) -> None:
    mix = mix_of(first, later)
    record = MixRecord(mix, {name: name for name in NAMES}, 8)
    assert MixRecord.read(record.facts()).mix.places(0, 300) == mix.places(0, 300)
    by_samples = MixRecord(Mix.by_samples({"a": 3, "b": 4}), {"a": "", "b": ""})
    assert MixRecord.read(by_samples.facts()) == by_samples


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"a": -1, "b": 2}, "none may be negative"),
        ({"a": 0}, "one must be above 0"),
        ({"a": 1e-30, "b": 1}, "too small"),
    ],
)
def test_weights_that_cannot_be_followed_are_refused(weights: Mapping[str, float], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        Mix.by_weights(["a", "b"], [MixStage(0, weights)])


# Samples of real sources.

LENGTH = 16


@pytest.fixture
def sources(write_corpus: Callable[..., Path]) -> dict[str, PackedSamples]:
    sizes = {"books": 40, "code": 90, "web": 150}
    return {
        name: PackedSamples([write_corpus(numbered_documents(size), name=name)], LENGTH, 3)
        for name, size in sizes.items()
    }


def mixed(sources: Mapping[str, PackedSamples], stages: list[MixStage]) -> MixedSamples:
    return MixedSamples(sources, Mix.by_weights([*sources], stages))


def test_a_source_keeps_its_own_order(sources: dict[str, PackedSamples]) -> None:
    """Its epochs are keyed by itself: what else is in the mix, and how much of it, moves nothing in it."""
    small = {name: sources[name] for name in ("code", "web")}
    for samples in (
        mixed(sources, [MixStage(0, {"books": 1, "code": 2, "web": 3})]),
        mixed(small, [MixStage(0, {"web": 1, "code": 3}), MixStage(70, {"web": 1})]),
    ):
        read: dict[str, list[Any]] = {name: [] for name in samples.sources}
        for k in range(400):
            name = samples.mix.names[samples.mix.place(k)[0]]
            read[name].append(samples.sample(k))
            assert samples.count_valid_targets(k) == int(target_is_valid(read[name][-1]).sum())
        for name, found in read.items():
            alone = PackedSamples([sources[name].documents(0)[0].prefix], LENGTH, 3)
            assert found and all(np.array_equal(one.tokens, alone.sample(j).tokens) for j, one in enumerate(found))


def test_a_source_without_weight_changes_nothing_until_a_stage_reads_it(sources: dict[str, PackedSamples]) -> None:
    before = mixed({name: sources[name] for name in ("code", "web")}, [MixStage(0, {"code": 0.3, "web": 0.7})])
    after = mixed(sources, [MixStage(0, {"code": 0.3, "web": 0.7}), MixStage(64, {"books": 1, "web": 1})])
    assert before.fingerprint != after.fingerprint
    assert before.record.first_difference(after.record, 64) is None
    for k in range(64):
        assert np.array_equal(before.sample(k).tokens, after.sample(k).tokens)


@pytest.mark.parametrize("document_mask", [True, False])
def test_all_layouts_and_batch_sizes_read_one_stream(sources: dict[str, PackedSamples], document_mask: bool) -> None:
    """Sample k and the batch that it lies in depend on no rank, micro-batch or restart (I1, T2)."""
    stages = [MixStage(0, {"books": 1, "code": 2, "web": 3}), MixStage(96, {"books": 3, "code": 1})]
    alone = mixed(sources, stages)
    for replicas, micro, batch in itertools.product((1, 2, 4), (1, 2), (8, 16)):
        samples = mixed(sources, stages)
        for consumed in range(64, 128, batch):
            plans = [BatchPlan(batch, micro, rank, replicas, document_mask) for rank in range(replicas)]
            parts = [part for plan in plans for part in global_batch(samples, plan, consumed)]
            assert np.concatenate([part.samples for part in parts]).tolist() == list(range(consumed, consumed + batch))
            tokens = np.concatenate([part.tokens for part in parts])
            assert np.array_equal(tokens, [alone.sample(k).tokens[:-1] for k in range(consumed, consumed + batch)])
            valid = sum(alone.count_valid_targets(k) for k in range(consumed, consumed + batch))
            assert {part.global_valid_targets for part in parts} == {valid if document_mask else batch * LENGTH}
            rows = np.concatenate([part.sources for part in parts])
            assert rows.tolist() == [alone.mix.place(k)[0] for k in range(consumed, consumed + batch)]


def test_numbers_stay_exact_far_out() -> None:
    """Products of numbers near 2^64 lose nothing, as they would in numpy."""
    mix = mix_of([1, 1, 1, 1])
    k = 10**15 + 7
    source, j = mix.place(k)
    assert mix.multiplier * k > MODULUS and abs(j - k / 4) < 16 and mix.sample_of(source, j) == k
