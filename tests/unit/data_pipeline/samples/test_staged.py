"""Samples that are read in parts: no token is left out or read twice, whatever lengths a run goes through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.loader import BatchPlan, global_batch
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.mix import Mix, MixedSamples, MixStage
from data_pipeline.samples.staged import CutSamples
from data_pipeline.storage.indexed_writer import IndexedWriter
from tests.helpers.sample_views import positions, target_is_valid

LONGEST = 32


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """Documents of tokens that are all different: 1, 2, 3, ..."""
    random, first = np.random.default_rng(2), 1
    with IndexedWriter(tmp_path / "numbered", np.int32) as writer:
        for length in random.integers(1, 70, 40).tolist():
            writer.append(np.arange(first, first + length, dtype=np.int32), np.array([length]))
            first += length
    return tmp_path / "numbered"


def test_an_epoch_in_several_lengths_has_every_target_once(numbered: Path) -> None:
    """Five samples in sequences of 8, then three in sequences of 16, the rest whole."""
    samples = PackedSamples([numbered], LONGEST, 3, "train", 0.0)
    size, targets, begin = samples.samples_per_epoch, [], 0
    for stop, parts in ((5, 4), (8, 2), (size, 1)):
        read = CutSamples(samples, parts)
        for r in range(begin * parts, stop * parts):
            tokens = read.sample(r).tokens
            assert len(tokens) == LONGEST // parts + 1 == read.sequence_length + 1
            targets += tokens[1:].tolist()
        begin = stop
    once = range(2, samples.token_count + 1)
    wrapped = size * LONGEST - len(once)  # the last block goes on with the start of the stream
    assert sorted(targets) == sorted([*once, *range(1, wrapped + 1)])


def test_parts_have_the_documents_of_the_whole(numbered: Path) -> None:
    """A document that begins between two parts masks the last target of the first, and no place of the second."""
    samples = PackedSamples([numbered], LONGEST, 3, "train", 0.0)
    read = CutSamples(samples, 4)
    for k in range(samples.samples_per_epoch):
        whole, parts = samples.sample(k), [read.sample(4 * k + part) for part in range(4)]
        assert np.array_equal(np.concatenate([target_is_valid(part) for part in parts]), target_is_valid(whole))
        valid = sum(target_is_valid(part).sum() for part in parts)
        assert read.count_valid_targets_between(4 * k, 4 * k + 4) == valid
        starts = [part * 8 + start for part, one in enumerate(parts) for start in one.starts.tolist()]
        assert starts == whole.starts.tolist()
        assert all(positions(part)[0] == 0 for part in parts), "a sequence sees nothing before it"


def test_replicas_share_the_parts_and_count_the_same_targets(numbered: Path) -> None:
    samples = CutSamples(PackedSamples([numbered], LONGEST, 3, "train", 0.0), 4)
    plans = [BatchPlan(8, 2, rank, 2, document_mask=True) for rank in range(2)]
    batches = [batch for plan in plans for batch in global_batch(samples, plan, 16)]
    assert [number for batch in batches for number in batch.samples.tolist()] == list(range(16, 24))
    valid = sum(int((batch.targets != -100).sum()) for batch in batches)
    assert {batch.global_valid_targets for batch in batches} == {valid}
    assert all(batch.tokens.shape == (2, 8) for batch in batches)


def test_rows_come_from_the_sources_of_their_samples(numbered: Path) -> None:
    """The training loss of a part would be told as that of another source."""
    mix = Mix.by_weights(["a", "b", "c"], [MixStage(0, {"a": 0.5, "b": 0.3, "c": 0.2})])
    names = enumerate(mix.names)
    whole = MixedSamples({name: PackedSamples([numbered], LONGEST, seed, "train", 0.0) for seed, name in names}, mix)
    for consumed in (0, 80, 96):
        (batch,) = global_batch(CutSamples(whole, 4), BatchPlan(16, 16, 0, 1, document_mask=False), consumed)
        places = [mix.place(r // 4) for r in batch.samples.tolist()]
        assert batch.sources is not None and batch.sources.tolist() == [source for source, _ in places]
        for r, (source, j), row in zip(batch.samples.tolist(), places, batch.tokens, strict=True):
            of_source = whole.sources[mix.names[source]].sample(j).tokens
            assert np.array_equal(row, of_source[r % 4 * 8 : r % 4 * 8 + 8])
