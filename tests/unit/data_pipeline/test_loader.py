"""The samples of a step are the same on every data-parallel layout; the prefetch thread changes nothing.

Windows over documents: every token predicted once, with the context that transformers' guide gives it.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.evaluation_windows import document_windows, equally_long_batches
from data_pipeline.loader import IGNORED_TARGET, BatchPlan, global_batch, prefetched_batches
from data_pipeline.samples.best_fit import BestFitSamples
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.mix import Mix, MixedSamples, MixStage
from data_pipeline.samples.packing_plan import PackingRequest, write_plan
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter
from tests.helpers.sample_views import positions, target_is_valid
from tests.helpers.small_corpora import SMALL_CORPORA, SmallCorpora
from tests.unit.data_pipeline.samples.test_dataset import EOS, give_meta, numbered_documents


@pytest.fixture
def samples(write_corpus: Callable[..., Path]) -> PackedSamples:
    return PackedSamples([write_corpus(numbered_documents(200))], 16, seed=3)


def batch(samples: PackedSamples, consumed: int, **changes: Any) -> list[Any]:
    arguments: dict[str, Any] = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "data_parallel_rank": 0,
        "data_parallel_size": 1,
        "document_mask": True,
    }
    return global_batch(samples, BatchPlan(**{**arguments, **changes}), consumed)


@pytest.mark.parametrize("document_mask", [True, False])
def test_every_replica_knows_how_many_targets_of_the_global_batch_count(
    write_corpus: Callable[..., Path], document_mask: bool
) -> None:
    """Counted from the index, with empty documents and documents of one token, over the ends of corpora and epochs."""
    draw = np.random.default_rng()
    lengths = [draw.integers(0, 7, 40), draw.integers(0, 30, 12)]
    corpora = [
        write_corpus([list(range(1, 1 + n)) for n in of_one], name=f"corpus{number}")
        for number, of_one in enumerate(lengths)
    ]
    found = PackedSamples(corpora, 16, seed=5)
    for consumed in range(0, 3 * found.samples_per_epoch, 8):
        replicas = [
            batch(found, consumed, data_parallel_size=2, data_parallel_rank=rank, document_mask=document_mask)
            for rank in (0, 1)
        ]
        valid = sum(int((each.targets != IGNORED_TARGET).sum()) for replica in replicas for each in replica)
        told = {each.global_valid_targets for replica in replicas for each in replica}
        assert told == {valid}, f"samples from {consumed} of documents of {lengths}"


@pytest.mark.parametrize("consumed", [0, 8, 8 * 1000])
@pytest.mark.parametrize("document_mask", [True, False])
def test_every_layout_has_the_same_global_batch(samples: PackedSamples, consumed: int, document_mask: bool) -> None:
    def whole(data_parallel_size: int, micro_batch_size: int) -> tuple[list[Any], list[Any]]:
        parts = [
            micro
            for rank in range(data_parallel_size)
            for micro in batch(
                samples,
                consumed,
                micro_batch_size=micro_batch_size,
                data_parallel_rank=rank,
                data_parallel_size=data_parallel_size,
                document_mask=document_mask,
            )
        ]
        return [row for part in parts for row in part.tokens.tolist()], [
            row for part in parts for row in part.targets.tolist()
        ]

    expected = [samples.sample(k).tokens[:-1].tolist() for k in range(consumed, consumed + 8)]
    reference = whole(1, 8)
    assert reference[0] == expected
    assert all(whole(dp, micro) == reference for dp, micro in [(1, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])


def test_targets_follow_inputs_and_documents_end_in_the_ignored_value(samples: PackedSamples) -> None:
    for masked, plain in zip(batch(samples, 0), batch(samples, 0, document_mask=False), strict=True):
        assert plain.positions is None
        assert np.array_equal(plain.targets[:, :-1], plain.tokens[:, 1:])
        ends = plain.tokens == EOS  # the target of EOS is the next document's first token
        assert ends.any()
        assert np.array_equal(masked.targets == IGNORED_TARGET, ends)
        assert np.array_equal(masked.targets[~ends], plain.targets[~ends])
        assert np.array_equal(masked.positions[:, 1:] == 0, ends[:, :-1])
        assert {masked.tokens.dtype, masked.targets.dtype, masked.positions.dtype} == {np.dtype(np.int64)}


@settings(max_examples=60)
@given(case=SMALL_CORPORA, kinds=st.lists(st.sampled_from([np.uint16, np.int32]), min_size=3, max_size=3))
def test_rows_of_a_micro_batch_are_those_of_its_samples(
    tmp_path_factory: pytest.TempPathFactory, case: SmallCorpora, kinds: list[type]
) -> None:
    """Rows are read, converted and masked together; against samples one by one, of each packing and of a mix."""
    corpora, sequence_length, seed, fraction, split = case
    folder, prefixes = tmp_path_factory.mktemp("rows"), []
    for number, lengths in enumerate(corpora):
        prefixes.append(folder / str(number))
        with IndexedWriter(prefixes[-1], kinds[number]) as writer:
            for length in lengths:
                writer.append(np.arange(1, 1 + length).astype(kinds[number]), np.array([length]))
        corpus = IndexedTokens(prefixes[-1])
        write_plan(PackingRequest(corpus, corpus.index_digest(), sequence_length, split, fraction))
    try:
        concat = PackedSamples(prefixes, sequence_length, seed, split, fraction)
    except DataError:
        reject()  # the split is empty
    best_fit = BestFitSamples(prefixes, sequence_length, seed, split, fraction)
    mix = Mix.by_weights(["a", "b"], [MixStage(0, {"a": 0.6, "b": 0.4})])
    for samples in (concat, best_fit, MixedSamples({"a": concat, "b": best_fit}, mix)):
        for mask in (True, False):
            (found,) = global_batch(samples, BatchPlan(5, 5, 0, 1, document_mask=mask), 5 * seed)
            for row, k in enumerate(range(5 * seed, 5 * seed + 5)):
                sample = samples.sample(k)
                carries = target_is_valid(sample) if mask or sample.loss is not None else True
                following = np.where(carries, sample.tokens[1:].astype(int), IGNORED_TARGET)
                assert found.tokens[row].tolist() == sample.tokens[:-1].tolist()
                assert found.targets[row].tolist() == following.tolist()
                assert not mask or found.positions[row].tolist() == positions(sample).tolist()


@pytest.mark.parametrize("wrong", [9, -1])
def test_one_wrong_id_in_a_micro_batch_is_one_sentence(write_corpus: Callable[..., Path], wrong: int) -> None:
    """Ids are looked at once per micro-batch; the sentence still names the sample."""
    ids = np.arange(160) % 9
    ids[100] = wrong
    samples = PackedSamples([write_corpus([ids], dtype=np.int32)], 16, 0, held_out_fraction=0, vocab_limit=9)
    k = next(k for k in range(samples.samples_per_epoch) if samples._block(k) == 6)
    with pytest.raises(DataError, match=rf"token id {wrong} in sample {k} of .* lies outside the"):
        global_batch(samples, BatchPlan(10, 10, 0, 1, document_mask=False), 0)


def test_rows_carry_their_number_in_the_run(samples: PackedSamples) -> None:
    """Counted over all epochs, or dropout would give a sequence the same masks each time it is seen."""
    consumed = 8 * (samples.samples_per_epoch // 8 + 1)  # in the second epoch
    numbers = [
        micro.samples.tolist()
        for rank in (0, 1)
        for micro in batch(samples, consumed, data_parallel_rank=rank, data_parallel_size=2)
    ]
    assert numbers == [[consumed + row, consumed + row + 1] for row in (0, 2, 4, 6)]


STREAMED = BatchPlan(4, 2, data_parallel_rank=1, data_parallel_size=2, document_mask=True)


def test_prefetching_gives_the_same_batches_and_resumes_anywhere(samples: PackedSamples) -> None:
    def tokens(stream: Any) -> list[Any]:
        return [[micro.tokens.tolist() for micro in step] for step in stream]

    expected = tokens(global_batch(samples, STREAMED, 4 * step) for step in range(7))
    assert tokens(prefetched_batches(samples, STREAMED, start_consumed=0, steps=7)) == expected
    assert tokens(prefetched_batches(samples, STREAMED, start_consumed=12, steps=4)) == expected[3:]


def test_an_error_in_the_thread_reaches_the_consumer(write_corpus: Callable[..., Path]) -> None:
    prefix = write_corpus(numbered_documents(20))
    give_meta(prefix, vocab_size=2)
    stream = prefetched_batches(PackedSamples([prefix], 16, 0), STREAMED, start_consumed=0, steps=3)
    with pytest.raises(DataError, match="outside the vocabulary"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_closing_early_ends_the_thread(samples: PackedSamples) -> None:
    stream = prefetched_batches(samples, STREAMED, start_consumed=0, steps=10**9)
    assert len(next(stream)) == 1
    assert any(thread.name.startswith("batches") for thread in threading.enumerate())
    stream.close()
    stream.close()
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


@pytest.mark.parametrize("sizes", [(6, 4, 1), (8, 2, 3), (0, 1, 1), (4, 0, 1)])
def test_an_impossible_division_is_one_sentence(samples: PackedSamples, sizes: tuple[int, int, int]) -> None:
    whole, micro, data_parallel = sizes
    with pytest.raises(DataError, match=f"a global batch of {whole} samples cannot be divided"):
        batch(samples, 0, global_batch_size=whole, micro_batch_size=micro, data_parallel_size=data_parallel)


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
