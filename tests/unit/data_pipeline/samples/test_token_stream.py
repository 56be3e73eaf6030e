"""The stream of a split is, to the token, that of a list of its documents; looking it up takes no such list."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.samples.order import is_held_out
from data_pipeline.samples.token_stream import Split
from data_pipeline.storage.file_io import RandomAccessFile
from tests.unit.data_pipeline.samples.test_dataset import give_meta

SALT = 0x6D6567616C697465


def mix64(value: int) -> int:
    """splitmix64's finaliser in integers of Python."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return value


def write_megatron(prefix: Path, tokens: NDArray[Any], lengths: NDArray[Any], documents: NDArray[Any]) -> Path:
    """Writes a pair field by field; `documents` are the numbers of the sequences at which documents begin, and end."""
    pointers = np.concatenate(([0], np.cumsum(lengths)[:-1])) * tokens.itemsize
    code = {"uint16": 8, "int32": 4, "uint8": 1, "int64": 5}[str(tokens.dtype)]
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + lengths.astype("<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + documents.astype("<i8").tobytes()
    )
    return prefix


class ListedDocuments:
    """The stream as version 0.1.0 built it: runs of neighbouring documents of the split, kept in memory."""

    def __init__(self, corpora: list[tuple[NDArray[Any], NDArray[Any]]], fraction: float, split: Split) -> None:
        self.corpora = corpora  # (tokens, first token of each document and the end of the last)
        runs = []
        for number, (_, edges) in enumerate(corpora):
            documents = np.array([mix64(mix64(i ^ SALT)) < int(fraction * 2**64) for i in range(len(edges) - 1)], bool)
            chosen = documents == (split == "held_out")
            turns = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
            runs += [(number, int(edges[a]), int(edges[b])) for a, b in turns.reshape(-1, 2) if edges[a] < edges[b]]
        self.runs = runs
        self.token_count = sum(high - low for _, low, high in runs)
        self.stream = [(number, place) for number, low, high in runs for place in range(low, high)]

    def sample(self, begin: int, count: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Returns the tokens, the places where documents start, and the documents, of a stretch."""
        tokens, starts, documents = [], [], []
        for done in range(count):
            number, place = self.stream[(begin + done) % self.token_count]
            of_one, edges = self.corpora[number]
            tokens.append(int(of_one[place]))
            document = int(np.searchsorted(edges[:-1], place, side="right")) - 1
            if edges[document] == place:
                starts.append(done)
            if not documents or documents[-1] != (number, document) or edges[document] == place:
                documents.append((number, document))
        return tokens, starts, documents


@pytest.mark.parametrize("sequences_per_document", [1, 3])
def test_the_stream_is_that_of_listed_documents(tmp_path: Path, sequences_per_document: int) -> None:
    """Old runs go on with the same samples: documents cross blocks of 1,024, empty ones and held-out ones between."""
    chance = np.random.default_rng(seed := int(np.random.default_rng().integers(2**32)))
    for case in range(4):
        fraction, length = float(chance.choice([0.0, 0.01, 0.2, 0.5])), int(chance.integers(1, 90))
        corpora, prefixes = [], []
        for number, count in enumerate([int(chance.integers(1, 40)), 2500, int(chance.integers(1000, 1100))]):
            kind = [np.uint16, np.int32, np.uint8][number] if case % 2 else np.uint16
            sequences = count * sequences_per_document
            lengths = chance.integers(0, 9, sequences) * (chance.random(sequences) < 0.7)
            documents = np.arange(count + 1)
            if sequences_per_document > 1:  # any number of sequences, none too
                documents = np.sort(np.concatenate(([0, sequences], chance.integers(0, sequences + 1, count - 1))))
            tokens = chance.integers(0, 250, int(lengths.sum())).astype(kind)
            prefixes.append(write_megatron(tmp_path / f"{case}-{number}", tokens, lengths, documents))
            corpora.append((tokens, np.concatenate(([0], np.cumsum(lengths)))[documents]))
        if sequences_per_document == 1 and case % 2:
            for prefix in prefixes:
                give_meta(prefix, vocab_size=250)  # then the index is not read when it is opened
        whole = PackedSamples(prefixes, length, 5, "train", fraction)
        for split in ("train", "held_out"):
            listed = ListedDocuments(corpora, fraction, split)
            if not listed.token_count:
                continue
            samples = whole.of_split(split)
            assert samples.token_count == listed.token_count, (seed, case, split)
            for k in {0, *chance.integers(0, 3 * samples.samples_per_epoch, 60).tolist()}:
                tokens, starts, documents = listed.sample(samples._block(k) * length, length + 1)
                found = samples.sample(k)
                assert found.tokens.tolist() == tokens, (seed, case, split, k)
                assert found.starts.tolist() == [start for start in starts if start], (seed, case, split, k)
                assert samples.count_valid_targets(k) == length - len(found.starts)
                named = [(one.prefix, i) for one in samples.documents(k) for i in range(one.first, one.last + 1)]
                full = [(prefixes[number], document) for number, document in documents]
                assert [each for each in named if each in set(full)] == full, (seed, case, split, k)


def test_held_out_documents_are_those_of_the_scalar_hash() -> None:
    chance = np.random.default_rng()
    first, fraction = int(chance.integers(0, 2**33)), float(chance.random() / 2)
    expected = [i for i in range(first, first + 9000) if mix64(mix64(i ^ SALT)) < int(fraction * 2**64)]
    found = np.flatnonzero(is_held_out(np.arange(first, first + 9000, dtype=np.uint64), fraction)) + first
    assert found.tolist() == expected
    assert not is_held_out(np.arange(5, dtype=np.uint64), 0.0).any()


@pytest.fixture(scope="module")
def many_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A million short documents in a sparse file, with metadata."""
    prefix = tmp_path_factory.mktemp("many") / "c"
    lengths = np.random.default_rng(0).integers(0, 40, 1_000_000)
    write_megatron(prefix, np.empty(0, dtype=np.uint16), lengths, np.arange(1_000_001))
    os.truncate(f"{prefix}.bin", 2 * int(lengths.sum()))
    give_meta(prefix, vocab_size=10)
    return prefix


def test_memory_does_not_grow_with_documents(many_documents: Path) -> None:
    """A list of the runs of documents took 20 bytes each: 5 MB here, 700 MB per split at a billion documents."""
    tracemalloc.start()
    samples = PackedSamples([many_documents], 512, 0, "train", 0.5)
    both = samples, samples.of_split("held_out")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert both[0].token_count + both[1].token_count == both[0]._corpora[0].token_count
    assert kept < 200_000 and peak < 8_000_000, (kept, peak)


def test_places_that_are_kept_hold_no_blocks(many_documents: Path) -> None:
    """4,096 samples keep their places, 1,024 blocks of 6 KiB stay: places that hold their blocks took 25 MB."""
    samples = PackedSamples([many_documents], 512, 0, "train", 0.01)
    tracemalloc.start()
    for k in range(4096):
        samples.count_valid_targets(k)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 12_000_000, kept


def test_a_sample_takes_a_read_or_two(many_documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other split opens nothing again; a sample reads its tokens, and once per 256 documents their places."""
    samples = PackedSamples([many_documents], 512, 0, "train", 0.01)
    places: list[tuple[str, int]] = []
    read = RandomAccessFile.read

    def counted(self: RandomAccessFile, place: int, into: NDArray[Any]) -> None:
        places.append((self.path.suffix, into.nbytes))
        read(self, place, into)

    monkeypatch.setattr(RandomAccessFile, "read", counted)
    samples.of_split("held_out")
    assert not places
    for k in range(300):
        samples.sample(k)
        samples.count_valid_targets(k)
    of_tokens = sum(size for suffix, size in places if suffix == ".bin")
    of_index = [size for suffix, size in places if suffix == ".idx"]
    assert of_tokens == 300 * 513 * 2
    assert len(of_index) <= 360 and max(of_index) <= 8 * 257, "one block of the index, or two, per sample"


def test_more_corpora_than_files_may_be_open(write_corpus: Callable[..., Path]) -> None:
    """A rank may often open 1,024 files; a mapped file would hold one for good."""
    prefixes = [write_corpus([[number, number, 1]] * 5, f"c{number}") for number in range(150)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    samples = PackedSamples(prefixes, 7, 0, "train", 0.0)
    seen = {token for k in range(samples.samples_per_epoch) for token in samples.sample(k).tokens.tolist()}
    assert seen == set(range(150))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 64


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_a_cold_sample_reads_little_more_than_its_bytes(tmp_path: Path) -> None:
    """A mapped file brought in 260 times the bytes of a sample, a whole read-ahead window."""
    chance, prefix = np.random.default_rng(), tmp_path / "c"
    tokens = chance.integers(0, 9, 16_000_000).astype(np.uint16)
    write_megatron(prefix, tokens, np.full(16_000, 1000), np.arange(16_001))
    samples = PackedSamples([prefix], 2048, 0, "train", 0.01)
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = bytes_from_disk()
    for k in range(200):
        samples.sample(k)
    read = bytes_from_disk() - before
    if not read:
        pytest.skip("this filesystem reads from no disk that /proc/self/io counts")
    assert read <= 4 * 200 * 2049 * 2, f"{read / (200 * 2049 * 2):.1f} bytes per byte of a sample"
