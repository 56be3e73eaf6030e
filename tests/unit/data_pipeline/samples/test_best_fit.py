"""Best-fit samples hold whole documents, every token once, and depend on fingerprint, seed and number only."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from data_pipeline.errors import DataError
from data_pipeline.loader import IGNORED_TARGET, BatchPlan, global_batch
from data_pipeline.samples.best_fit import BestFitSamples
from data_pipeline.samples.dataset import PackedSamples, Sample
from data_pipeline.samples.order import is_held_out
from data_pipeline.samples.packing_plan import PackingPlan, PackingRequest, write_plan
from data_pipeline.samples.token_stream import Split
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter
from tests.helpers.sample_views import cu_seqlens, positions, target_is_valid
from tests.helpers.small_corpora import SMALL_CORPORA, SmallCorpora
from tests.unit.data_pipeline.samples.test_dataset import give_meta

WriteCorpus = Callable[..., Path]


def write_plans(prefixes: Sequence[Path], sequence_length: int, split: Split, fraction: float) -> None:
    for prefix in prefixes:
        corpus = IndexedTokens(prefix)
        write_plan(PackingRequest(corpus, corpus.index_digest(), sequence_length, split, fraction))


def samples_of(
    prefixes: Sequence[Path], sequence_length: int, seed: int = 0, split: Split = "train", fraction: float = 0.0
) -> BestFitSamples:
    write_plans(prefixes, sequence_length, split, fraction)
    return BestFitSamples(prefixes, sequence_length, seed, split, fraction)


def pieces_of(sample: Sample) -> list[list[int]]:
    """The tokens of each piece of a sample; the last one may end in the last target."""
    edges = [0, *sample.starts.tolist(), len(sample.tokens)]
    found = [sample.tokens[begin:end].tolist() for begin, end in pairwise(edges)]
    return found if sample.loss is None else found[:-1]


@settings(max_examples=40)
@given(case=SMALL_CORPORA)
def test_an_epoch_holds_every_token_once_and_whole_documents(
    tmp_path_factory: pytest.TempPathFactory, case: SmallCorpora
) -> None:
    """Tokens are numbers that occur once, from 1 on: each tells its document, and its neighbours follow it."""
    corpora, sequence_length, seed, fraction, split = case
    folder = tmp_path_factory.mktemp("best_fit")
    prefixes, documents, following = [], dict[tuple[Path, int], list[int]](), 1
    for number, lengths in enumerate(corpora):
        prefixes.append(folder / str(number))
        chosen = is_held_out(np.arange(len(lengths), dtype=np.uint64), fraction) == (split == "held_out")
        with IndexedWriter(prefixes[-1], np.int32) as writer:
            for place, length in enumerate(lengths):
                tokens = np.arange(following, following + length, dtype=np.int32)
                writer.append(tokens, np.array([length]))
                following += length
                if length and chosen[place]:
                    documents[prefixes[-1], place] = tokens.tolist()
    if not documents:
        with pytest.raises(DataError, match=r"split of .* is empty"):
            samples_of(prefixes, sequence_length, seed, split, fraction)
        return
    samples = samples_of(prefixes, sequence_length, seed, split, fraction)
    assert samples.token_count == sum(map(len, documents.values()))
    size = samples.samples_per_epoch
    named: dict[tuple[Path, int], list[int]] = {document: [] for document in documents}
    predicted, pieces = Counter[tuple[int, int]](), []
    for k in range(size, 2 * size):  # the second epoch
        sample = samples.sample(k)
        inside = pieces_of(sample)
        valid = target_is_valid(sample)
        padding = 0 if sample.loss is None else int((~sample.loss).sum())
        predicted.update(zip(sample.tokens[:-1][valid].tolist(), sample.tokens[1:][valid].tolist(), strict=True))
        pieces += inside
        assert samples.count_valid_targets(k) == valid.sum() == sum(len(piece) - 1 for piece in inside)
        assert [*map(len, inside)] == sorted(map(len, inside), reverse=True)
        assert sum(map(len, inside)) == len(sample.tokens) - padding
        assert padding == 0 or set(sample.tokens[-padding:].tolist()) == {0}
        ranges = samples.documents(k)
        for piece, document in zip(inside, ranges, strict=True):
            assert document.first == document.last
            assert set(piece) <= set(documents[document.prefix, document.first])
            named[document.prefix, document.first].append(k)
        starts = cu_seqlens(sample).tolist()
        expected = [i - max(start for start in starts[:-1] if start <= i) for i in range(sequence_length)]
        assert positions(sample).tolist() == expected and starts[-1] == sequence_length
    assert predicted == Counter(pair for tokens in documents.values() for pair in pairwise(tokens))
    assert {token for piece in pieces for token in piece} == {token for each in documents.values() for token in each}
    held = {tuple(piece) for piece in pieces}
    for document, tokens in documents.items():
        assert tuple(tokens) in held or len(tokens) > sequence_length + 1
        assert samples.samples_of(*document, epoch=1) == sorted(set(named[document]))


def test_a_document_is_looked_for_once_for_all_epochs(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of a large corpus takes seconds to read."""
    looked_for = []
    bins_between = PackingPlan.bins_between

    def counted(plan: PackingPlan, first: int, end: int) -> list[int]:
        looked_for.append((first, end))
        return bins_between(plan, first, end)

    monkeypatch.setattr(PackingPlan, "bins_between", counted)
    prefix = write_corpus([[7] * 9] * 20)
    samples = samples_of([prefix], 16)
    found = {document: [samples.samples_of(prefix, document, epoch) for epoch in range(50)] for document in (3, 4)}
    assert looked_for == [(27, 36), (36, 45)] and all(all(each) for each in found.values())


def test_samples_depend_on_seed_epoch_and_packing_alone(write_corpus: WriteCorpus) -> None:
    """Also that the fingerprint differs from that of the same documents cut by concat."""
    prefix = write_corpus([range(1, 1 + n) for n in np.random.default_rng(1).integers(0, 30, 300)])
    samples, fresh, other = (samples_of([prefix], 16, seed) for seed in (7, 7, 8))
    size = samples.samples_per_epoch
    numbers = [0, 5, 1000, 3, 10**9, 17]
    first = {k: samples.sample(k).tokens.tolist() for k in numbers}
    assert {k: fresh.sample(k).tokens.tolist() for k in reversed(numbers)} == first
    orders = {
        tuple(tuple(source.sample(k).tokens.tolist()) for k in range(start, start + size))
        for source, start in ((samples, 0), (samples, size), (other, 0))
    }
    assert len(orders) == 3 and len({tuple(sorted(order)) for order in orders}) == 1
    fingerprints = {
        samples.fingerprint,
        samples_of([prefix], 17).fingerprint,
        samples_of([prefix], 16, fraction=0.1).fingerprint,
        samples_of([prefix], 16, split="held_out", fraction=0.1).fingerprint,
        PackedSamples([prefix], 16, 7, held_out_fraction=0.0).fingerprint,
    }
    assert samples.fingerprint == other.fingerprint and len(fingerprints) == 5


def test_every_replica_knows_how_many_targets_of_the_global_batch_count(write_corpus: WriteCorpus) -> None:
    """Padding is ignored, its positions begin at 0, and no sample is seen twice in an epoch."""
    draw = np.random.default_rng()
    corpora = [
        write_corpus([list(range(1, 1 + n)) for n in draw.integers(0, most, 40)], name=f"corpus{most}")
        for most in (7, 30)
    ]
    samples = samples_of(corpora, 16)
    for consumed in range(0, 2 * samples.samples_per_epoch, 8):
        replicas = [
            global_batch(samples, BatchPlan(8, 2, rank, data_parallel_size=2, document_mask=True), consumed)
            for rank in (0, 1)
        ]
        batches = [batch for replica in replicas for batch in replica]
        valid = sum(int((batch.targets != IGNORED_TARGET).sum()) for batch in batches)
        assert {batch.global_valid_targets for batch in batches} == {valid}
        for batch in batches:
            padded = batch.tokens == 0  # no document holds this id
            assert (batch.targets[padded] == IGNORED_TARGET).all() and (batch.targets != 0).all()
            begins = padded & ~np.pad(padded, ((0, 0), (1, 0)))[:, :-1]
            assert batch.positions is not None and (batch.positions[begins] == 0).all()


def test_much_padding_is_said_and_an_id_outside_the_vocabulary_refused(write_corpus: WriteCorpus) -> None:
    assert samples_of([write_corpus([[1] * 16] * 16, "full")], 15).notice() is None
    prefix = write_corpus([[1] * 9] * 10)
    notice = samples_of([prefix], 15).notice()
    assert notice is not None and notice.startswith("43.8% of the train split's samples is padding")
    assert "or data.packing concat, wastes less" in notice
    chats = samples_of([prefix], 15)
    chats.has_loss_mask = True  # concat refuses conversations that must stay whole
    notice = chats.notice()
    assert notice is not None and "concat" not in notice and notice.endswith("another sequence_length wastes less")
    give_meta(prefix, vocab_size=1)
    with pytest.raises(DataError, match="was written for another index"):  # give_meta writes a wrong digest
        BestFitSamples([prefix], 15, 0, held_out_fraction=0.0)
    give_meta(prefix, vocab_size=1, idx_sha256=IndexedTokens(prefix).index_digest())
    with pytest.raises(DataError, match=r"token id 1 in sample 0 of .* outside the vocabulary of 1"):
        BestFitSamples([prefix], 15, 0, held_out_fraction=0.0).sample(0)
