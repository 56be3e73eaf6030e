"""Counts that are kept beside a corpus save a pass over its index, and are never those of another corpus."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.samples import split_sizes
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.order import is_held_out
from data_pipeline.storage.indexed import IndexedTokens
from tests.unit.data_pipeline.samples.test_dataset import give_meta

WriteCorpus = Callable[..., Path]
DOCUMENTS = 5000  # of several blocks of either split, the last of them not full


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every corpus a large one."""
    monkeypatch.setattr(split_sizes, "_FEWEST", 1)


def write_numbered(write_corpus: WriteCorpus, name: str, seed: int) -> Path:
    lengths = np.random.default_rng(seed).integers(0, 9, DOCUMENTS).tolist()
    prefix = write_corpus([[i % 97] * length for i, length in enumerate(lengths)], name)
    give_meta(prefix, vocab_size=97, idx_sha256=IndexedTokens(prefix).index_digest())
    return prefix


def token_counts(prefix: Path, fraction: float) -> tuple[int, int]:
    """Opens the corpus; returns the tokens of both splits."""
    train = PackedSamples([prefix], 16, 0, "train", fraction)
    return train.token_count, train.of_split("held_out").token_count


def counted_by_hand(prefix: Path, fraction: float) -> tuple[int, int]:
    starts = IndexedTokens(prefix).starts(0, DOCUMENTS)
    held_out = int(np.diff(starts)[is_held_out(np.arange(DOCUMENTS, dtype=np.uint64), fraction)].sum())
    return int(starts[-1]) - held_out, held_out


@pytest.mark.usefixtures("large")
def test_the_next_process_reads_no_index_and_the_same_samples(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_numbered(write_corpus, "c", 1)
    first = PackedSamples([prefix], 16, 3, "train", 0.2)
    expected = [first.sample(k).tokens.tolist() for k in range(2 * first.samples_per_epoch)]
    assert token_counts(prefix, 0.3) == counted_by_hand(prefix, 0.3), "another fraction has a file of its own"
    assert len([*prefix.parent.glob("c.split-*.counts")]) == 2
    looked_up: list[tuple[int, int]] = []
    starts = IndexedTokens.starts

    def noted(self: IndexedTokens, first: int, stop: int) -> np.ndarray:
        looked_up.append((first, stop))
        return starts(self, first, stop)

    monkeypatch.setattr(IndexedTokens, "starts", noted)
    again = PackedSamples([prefix], 16, 3, "train", 0.2)
    assert not looked_up
    assert [again.sample(k).tokens.tolist() for k in range(2 * again.samples_per_epoch)] == expected
    assert max(stop - first for first, stop in looked_up) == 256


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("damage", ["flipped bit", "cut off", "longer", "a folder", "another corpus"])
def test_a_file_that_is_not_of_this_corpus_is_not_used(write_corpus: WriteCorpus, damage: str) -> None:
    """A wrong count would shift every later sample by some tokens, in silence."""
    prefix, other = write_numbered(write_corpus, "c", 1), write_numbered(write_corpus, "other", 2)
    expected = token_counts(prefix, 0.2)
    assert expected == counted_by_hand(prefix, 0.2)
    path = Path(f"{prefix}.split-0.2.counts")
    content = path.read_bytes()
    if damage == "flipped bit":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif damage == "cut off":
        path.write_bytes(content[:-8])
    elif damage == "longer":
        path.write_bytes(content + content)
    elif damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        assert token_counts(other, 0.2) == counted_by_hand(other, 0.2) != expected
        Path(f"{other}.split-0.2.counts").replace(path)
    assert token_counts(prefix, 0.2) == expected
    assert path.is_dir() or path.read_bytes() == content, "the right counts take its place"


@pytest.mark.usefixtures("large")
def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(
    write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(split_sizes, "write_atomically", refuse)
    prefix = write_numbered(write_corpus, "c", 1)
    assert token_counts(prefix, 0.2) == counted_by_hand(prefix, 0.2)
    assert not [*prefix.parent.glob("*.counts")]


@pytest.mark.usefixtures("large")
def test_an_index_that_was_changed_below_its_metadata_is_one_sentence(write_corpus: WriteCorpus) -> None:
    """Metadata is trusted, so that counts seem to fit; reading went on for ever in a block that had become shorter."""
    prefix = write_numbered(write_corpus, "c", 1)
    assert token_counts(prefix, 0.2) == counted_by_hand(prefix, 0.2)
    shorter_begin = write_corpus([[1]] * 4999 + [[1] * (IndexedTokens(prefix).token_count - 4999)], "other")
    Path(f"{shorter_begin}.idx").replace(f"{prefix}.idx")
    samples = PackedSamples([prefix], 16, 0, "train", 0.2)
    with pytest.raises(DataError, match=r"c.idx is not the index .* `megalite data check"):
        for k in range(samples.samples_per_epoch):
            samples.sample(k)


def test_small_corpora_have_no_such_file(write_corpus: WriteCorpus) -> None:
    prefix = write_numbered(write_corpus, "c", 1)
    assert token_counts(prefix, 0.2) == counted_by_hand(prefix, 0.2)
    assert not [*prefix.parent.glob("*.counts")]
