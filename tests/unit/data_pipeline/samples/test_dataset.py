"""Packing loses and repeats nothing, and a sample depends on nothing but fingerprint, seed and its number."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from data_pipeline.errors import DataError
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.order import is_held_out
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter
from data_pipeline.storage.meta import CorpusMeta, meta_path
from tests.helpers.sample_views import cu_seqlens, positions, target_is_valid
from tests.helpers.small_corpora import SMALL_CORPORA, SmallCorpora

WriteCorpus = Callable[..., Path]
EOS = 0


def numbered_documents(count: int, length: Callable[[int], int] = lambda i: 3 + i % 11) -> list[list[int]]:
    """Documents of distinct ids that end with EOS; a token tells where it came from."""
    documents, following = [], 1
    for i in range(count):
        documents.append([*range(following, following + length(i)), EOS])
        following += length(i)
    return documents


def split_documents(documents: list[list[int]], fraction: float, held_out: bool) -> list[list[int]]:
    mask = is_held_out(np.arange(len(documents), dtype=np.uint64), fraction)
    return [document for document, out in zip(documents, mask, strict=True) if out == held_out]


@settings(max_examples=40)
@given(case=SMALL_CORPORA)
def test_an_epoch_conserves_every_token(tmp_path_factory: pytest.TempPathFactory, case: SmallCorpora) -> None:
    """Against a packing done the obvious way, in memory: blocks, document starts and validity are all equal."""
    corpora, sequence_length, seed, fraction, split = case
    folder = tmp_path_factory.mktemp("packing")
    stream: list[int] = []
    starts: set[int] = set()
    prefixes = []
    following = 0
    for number, lengths in enumerate(corpora):
        documents = []
        for length in lengths:
            documents.append(list(range(following, following + length)))
            following += length
        prefixes.append(folder / str(number))
        with IndexedWriter(prefixes[-1], np.int32) as writer:
            for document in documents:
                writer.append(np.array(document, dtype=np.int32), np.array([len(document)]))
        for document in split_documents(documents, fraction, split == "held_out"):
            if document:
                starts.add(len(stream))
                stream += document
    if not stream:
        with pytest.raises(DataError, match=r"split of .* is empty"):
            PackedSamples(prefixes, sequence_length, seed, split, fraction)
        return
    samples = PackedSamples(prefixes, sequence_length, seed, split, fraction)
    assert samples.token_count == len(stream)
    epoch = [samples.sample(samples.samples_per_epoch + i) for i in range(samples.samples_per_epoch)]  # the second
    place_of = {token: place for place, token in enumerate(stream)}
    epoch.sort(key=lambda sample: place_of[int(sample.tokens[0])])
    targets = [token for sample in epoch for token in sample.tokens[1:].tolist()]
    assert targets[: len(stream) - 1] == stream[1:]  # every token but the first, exactly once
    wrapped = targets[len(stream) - 1 :]
    assert len(wrapped) < sequence_length or len(stream) == 1
    assert wrapped == [stream[i % len(stream)] for i in range(len(wrapped))]
    for sample in epoch:
        begins = [i for i, token in enumerate(sample.tokens.tolist()) if place_of[token] in starts]
        inner = [i for i in begins if 0 < i < sequence_length]
        assert cu_seqlens(sample).tolist() == [0, *inner, sequence_length]
        assert target_is_valid(sample).tolist() == [i + 1 not in begins for i in range(sequence_length)]
        last_start = 0
        for i, position in enumerate(positions(sample).tolist()):
            last_start = i if i in inner else last_start
            assert position == i - last_start


def test_a_sample_does_not_depend_on_the_order_asked_or_on_others(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus(numbered_documents(300))
    forward, fresh = PackedSamples([prefix], 16, seed=7), PackedSamples([prefix], 16, seed=7)
    numbers = [0, 5, 1000, 3, 10**9, 17]
    first = {k: forward.sample(k).tokens.tolist() for k in range(20)} | {
        k: forward.sample(k).tokens.tolist() for k in numbers
    }
    assert {k: fresh.sample(k).tokens.tolist() for k in reversed(numbers)} == {k: first[k] for k in numbers}


def test_epochs_and_seeds_have_different_orders(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus(numbered_documents(300))
    samples, other = PackedSamples([prefix], 16, seed=7), PackedSamples([prefix], 16, seed=8)
    size = samples.samples_per_epoch
    orders = {
        tuple(int(source.sample(k).tokens[0]) for k in range(start, start + size))
        for source, start in ((samples, 0), (samples, size), (other, 0))
    }
    assert len(orders) == 3


def test_splits_are_disjoint_complete_spread_and_stable(write_corpus: WriteCorpus) -> None:
    documents = numbered_documents(2000)
    held_out = split_documents(documents, 0.05, held_out=True)
    train = split_documents(documents, 0.05, held_out=False)
    assert sorted(held_out + train) == sorted(documents)
    assert 60 < len(held_out) < 140  # 100 expected, 4 sigma
    assert documents.index(held_out[0]) < 200  # not the tail
    assert split_documents(documents[:1000], 0.05, True) == [d for d in held_out if d in documents[:1000]]
    prefix = write_corpus(documents)
    counts = [PackedSamples([prefix], 16, 0, split, 0.05).token_count for split in ("train", "held_out")]
    assert counts == [sum(map(len, train)), sum(map(len, held_out))]


def test_a_corpus_below_one_sample_repeats_and_says_so(write_corpus: WriteCorpus) -> None:
    samples = PackedSamples([write_corpus([[1, 2, 3, EOS]])], 10, seed=0, held_out_fraction=0.0)
    sample = samples.sample(5)
    assert sample.tokens.tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert cu_seqlens(sample).tolist() == [0, 4, 8, 10]
    assert samples.notice() == (
        "the train split has 4 tokens, less than one sample of 10 + 1: every sample repeats the whole split"
    )
    assert PackedSamples([write_corpus(numbered_documents(50), "big")], 10, seed=0).notice() is None


def test_one_document_is_training_text(write_corpus: WriteCorpus) -> None:
    """A single text file is a common corpus: its only document must not be held out by chance."""
    prefix = write_corpus([list(range(100))])
    assert PackedSamples([prefix], 10, seed=0, held_out_fraction=0.2).token_count == 100


def test_the_fingerprint_knows_content_and_packing_not_seed_or_place(write_corpus: WriteCorpus, tmp_path: Path) -> None:
    documents = numbered_documents(100)
    first, copy = write_corpus(documents, "a"), write_corpus(documents, "b")
    base = PackedSamples([first], 16, 0).fingerprint
    assert PackedSamples([first], 16, 99).fingerprint == base == PackedSamples([copy], 16, 0).fingerprint
    others = [
        PackedSamples([first], 17, 0),
        PackedSamples([first], 16, 0, "held_out", 0.1),
        PackedSamples([first], 16, 0, "train", 0.1),
        PackedSamples([first, copy], 16, 0),
        PackedSamples([write_corpus(documents[:-1], "c")], 16, 0),
    ]
    assert len({base, *(samples.fingerprint for samples in others)}) == 6


def give_meta(prefix: Path, vocab_size: int, tokenizer: str = "t", **changes: object) -> None:
    tokens = IndexedTokens(prefix)
    fields = {
        "tokenizer_sha256": tokenizer,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "eos_token_id": 0,
        "token_count": tokens.token_count,
        "document_count": len(tokens),
        "dtype": str(tokens.dtype),
        "sha256": "0",
        "idx_sha256": "0",
        "sources": ["x"],
        "job_sha256": "0",
    }
    CorpusMeta(**{**fields, **changes}).write(prefix)  # type: ignore[arg-type]


def test_meta_data_gives_vocabulary_and_end(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([[1, 2, 3, EOS]])
    assert PackedSamples([prefix], 2, 0).vocab_size is None
    give_meta(prefix, vocab_size=4)
    samples = PackedSamples([prefix], 2, 0)
    assert (samples.vocab_size, samples.eos_token_id) == (4, 0)


def test_an_id_above_the_vocabulary_is_one_sentence(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([[1, 2, 3, EOS]])
    give_meta(prefix, vocab_size=3)
    with pytest.raises(DataError, match=r"token id 3 in sample 0 of .* outside the vocabulary of 3"):
        PackedSamples([prefix], 3, 0).sample(0)


def test_an_id_above_the_models_vocabulary_is_one_sentence(write_corpus: WriteCorpus) -> None:
    """A corpus without meta data: under tensor parallelism no rank would own the id, and training would go on."""
    prefix = write_corpus([[1, 2, 3]])
    assert PackedSamples([prefix], 2, 0, held_out_fraction=0, vocab_limit=4).sample(0)
    with pytest.raises(DataError, match=r"token id 3 in sample 0 of .* model's vocabulary of 3: .* at least 4$"):
        PackedSamples([prefix], 2, 0, held_out_fraction=0, vocab_limit=3).sample(0)
    give_meta(prefix, vocab_size=3)
    with pytest.raises(DataError, match="vocabulary of 3: the token file is damaged"):
        PackedSamples([prefix], 2, 0, held_out_fraction=0, vocab_limit=9).sample(0)


def test_bad_requests_are_one_sentence(write_corpus: WriteCorpus) -> None:
    prefix, other = write_corpus([[1, 2, 3, EOS]]), write_corpus([[1, 2]], "other")
    with pytest.raises(DataError, match="no corpus is given"):
        PackedSamples([], 4, 0)
    with pytest.raises(DataError, match="sequence_length 0"):
        PackedSamples([prefix], 0, 0)
    with pytest.raises(DataError, match=r"held_out_fraction 1.5 is impossible"):
        PackedSamples([prefix], 4, 0, "train", 1.5)
    with pytest.raises(DataError, match="split 'test' does not exist"):
        PackedSamples([prefix], 4, 0, "test")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"held_out split of .* is empty \(documents: 1, "):
        PackedSamples([prefix], 4, 0, "held_out", 0.01)
    give_meta(prefix, 4)
    give_meta(other, 4, tokenizer="another")
    with pytest.raises(DataError, match="made with different tokenizers"):
        PackedSamples([prefix, other], 4, 0)
    give_meta(prefix, 4, token_count=5)
    with pytest.raises(DataError, match="describes another corpus"):
        PackedSamples([prefix], 4, 0)
    meta_path(prefix).write_text("{")
    with pytest.raises(DataError, match="not readable as metadata"):
        PackedSamples([prefix], 4, 0)


def test_a_sample_names_the_documents_it_is_packed_from(write_corpus: WriteCorpus) -> None:
    """Against the documents that hold its tokens; two corpora, gaps of held-out and of empty documents, a wrap."""
    lengths = [5, 0, 12, 1, 0, 0, 30, 2, 9, 0, 4, 17, 0]
    place_of: dict[int, tuple[Path, int]] = {}
    prefixes, following = [], 0
    for name in ("first", "second"):
        documents = [list(range(following + sum(lengths[:i]), following + sum(lengths[: i + 1]))) for i in range(13)]
        following += sum(lengths)
        prefixes.append(write_corpus(documents, name))
        place_of |= {token: (prefixes[-1], i) for i, document in enumerate(documents) for token in document}
    for sequence_length in (1, 7, 33):
        samples = PackedSamples(prefixes, sequence_length, 3, "train", 0.3)
        for k in range(2 * samples.samples_per_epoch):
            ranges = samples.documents(k)
            named = [(one.prefix, number) for one in ranges for number in range(one.first, one.last + 1)]
            held = [place_of[token] for token in samples.sample(k).tokens.tolist()]
            assert set(held) == {document for document in named if lengths[document[1]]}
            ends = [(one.prefix, number) for one in ranges for number in (one.first, one.last)]
            assert (ends[0], ends[-1]) == (held[0], held[-1])


def test_other_tokens_in_documents_of_the_same_lengths_have_another_digest(write_corpus: WriteCorpus) -> None:
    """Without metadata the fingerprint knows lengths only: a run went on with other text in silence."""
    first, other = [[1, 2, 3], [4] * 5000, [5]], [[1, 2, 3], [4] * 4990 + [6] * 10, [5]]
    opened = [PackedSamples([write_corpus(documents, name)], 8, 0) for documents, name in ((first, "a"), (other, "b"))]
    assert len({samples.fingerprint for samples in opened}) == 1, "fingerprints of older runs stay"
    assert len({samples.content_digest for samples in opened}) == 2
    assert opened[0].content_digest == PackedSamples([write_corpus(first, "c")], 8, 0).content_digest
    prefix = write_corpus(first, "d")
    give_meta(prefix, vocab_size=9)
    assert PackedSamples([prefix], 8, 0).content_digest == "", "then the digest of all is known"
