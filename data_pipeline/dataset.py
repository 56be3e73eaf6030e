"""Packed samples of a prepared corpus: the documents of a split, the order of an epoch, the samples.

Sample k of a run is a pure function of (fingerprint, seed, k). The documents of a split, in file order, are one stream
of T tokens. An epoch cuts it into ceil((T - 1) / S) blocks of S inputs, S = sequence_length; a block takes one more
token, the target of its last input, which is also the first input of the next block. The last block wraps around to
the start of the stream. So in an epoch every token but the first is a target exactly once, and fewer than S tokens at
the start are targets a second time. Epoch e visits the blocks in the order of a computed permutation; nothing is
stored per sample, and the length of the run, the ranks and the workers do not enter.
"""

import hashlib
import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.indexed import IndexedTokens
from data_pipeline.meta import CorpusMeta, read_meta

_SALT = 0x6D6567616C697465  # "megalite"
_HASHED_AT_ONCE = 1 << 20  # documents
_NONE = np.empty(0, dtype=np.int64)

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Sample:
    """One packed sequence of S tokens and the token that follows it."""

    tokens: NDArray[np.int64]  # [S + 1]; inputs are [:-1], targets [1:]
    cu_seqlens: NDArray[np.int32]  # [documents + 1] 0, every document start inside the inputs, S
    positions: NDArray[np.int64]  # [S] distance from the start of the document, or of the sample
    last_target_starts_document: bool

    @property
    def target_is_valid(self) -> NDArray[np.bool_]:
        """[S] bools: False where the target is the first token of another document."""
        valid = np.ones(len(self.positions), dtype=np.bool_)
        valid[self.cu_seqlens[1:-1] - 1] = False
        valid[-1] = not self.last_target_starts_document
        return valid


@dataclass(frozen=True)
class DocumentRange:
    """A range of neighbouring documents of a corpus."""

    prefix: Path
    first: int  # number of the document in the corpus, from 0
    last: int  # the same as `first` where it is one

    def __str__(self) -> str:
        which = f"document {self.first}" if self.first == self.last else f"documents {self.first} to {self.last}"
        return f"{which} of {self.prefix}"


class Samples(Protocol):
    """The samples of one split of prepared text, in the order of a run. Sample k is a pure function of
    (fingerprint, seed, k), so that a loader, an evaluation and an audit need no other state."""

    sequence_length: int
    seed: int
    split: Split
    fingerprint: str  # of the content, the split and the packing; the seed is not in it
    samples_per_epoch: int
    token_count: int  # of the split
    vocab_size: int | None  # None if the corpora have no metadata
    eos_token_id: int | None

    def sample(self, k: int) -> Sample:
        """Returns sample number k >= 0 of the run, counted over all epochs."""

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k carry loss; reads no tokens."""

    def documents(self, k: int) -> list[DocumentRange]:
        """Returns the documents that sample k holds tokens of, its last target included, in the order of the sample."""

    def samples_of(self, prefix: Path, document: int, epoch: int) -> list[int]:
        """Returns the samples of an epoch that hold tokens of one document of a corpus, in rising order.

        `documents` of these samples, and of no others of the epoch, name it. No sample is read.
        """

    def notice(self) -> str | None:
        """Returns a notice for the user about the data, or None."""


class PackedSamples:
    """The samples of one split of one or more corpora; several are read one after the other."""

    fingerprint: str  # of the content, the split and the packing; the seed is not in it
    samples_per_epoch: int
    token_count: int  # of the split
    vocab_size: int | None  # None if the corpora have no metadata
    eos_token_id: int | None

    def __init__(
        self,
        prefixes: Sequence[Path],
        sequence_length: int,
        seed: int,
        split: Split = "train",
        held_out_fraction: float = 0.01,
        *,
        vocab_limit: int | None = None,  # of the model: larger ids are refused
    ) -> None:
        _check_arguments(prefixes, sequence_length, split, held_out_fraction)
        self.sequence_length, self.seed, self.split = sequence_length, seed, split
        self.held_out_fraction = held_out_fraction
        self._corpora = [IndexedTokens(prefix) for prefix in prefixes]
        metas = [_matching_meta(corpus) for corpus in self._corpora]
        self.vocab_size, self.eos_token_id = _common_vocabulary(self._corpora, metas)
        self._id_limit = min(2**63 if size is None else size for size in (self.vocab_size, vocab_limit))
        self.fingerprint = self._fingerprint(metas)
        self._map_stream()
        self.samples_per_epoch = max(1, -(-(self.token_count - 1) // sequence_length))

    def sample(self, k: int) -> Sample:
        """Returns sample number k >= 0 of the run, counted over all epochs."""
        block = self._block(k)
        tokens, starts = self._read(block * self.sequence_length, self.sequence_length + 1)
        self._check_ids(tokens, block)
        return _packed(tokens, starts)

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k are no first token of a document; reads no tokens."""
        starts, done = set(), 0
        for corpus, low, high in self._spans(self._block(k) * self.sequence_length, self.sequence_length + 1):
            starts.update((_starts_between(corpus, low, high) + done).tolist())  # empty documents share a start
            done += high - low
        return self.sequence_length - len(starts - {0})

    def documents(self, k: int) -> list[DocumentRange]:
        """Returns the documents that sample k holds tokens of, its last target included, in the order of the stream.

        Empty documents are left out.
        """
        ranges = []
        for corpus, low, high in self._spans(self._block(k) * self.sequence_length, self.sequence_length + 1):
            width = corpus.dtype.itemsize
            # the last of the documents that start at or before a token's place holds the token
            first = bisect_right(corpus.document_offsets, low * width) - 1
            last = bisect_right(corpus.document_offsets, (high - 1) * width) - 1
            ranges.append(DocumentRange(corpus.prefix, first, last))
        return ranges

    def samples_of(self, prefix: Path, document: int, epoch: int) -> list[int]:
        """Returns the samples of an epoch that hold tokens of one document of a corpus, in rising order."""
        key, size = epoch_key(self.seed, epoch, self.fingerprint), self.samples_per_epoch
        blocks: set[int] = set()
        for begin, end in self._places_of(prefix, document):
            while begin <= size * self.sequence_length:  # the last blocks wrap around to the start of the stream
                first = max(0, -(-begin // self.sequence_length) - 1)  # a block holds one token of the next
                blocks.update(range(first, min(size, (end - 1) // self.sequence_length + 1)))
                begin, end = begin + self.token_count, end + self.token_count
        return sorted(epoch * size + index_of_permuted(block, size, key) for block in blocks)

    def notice(self) -> str | None:
        """Returns a notice for the user if the split is smaller than one sample."""
        if self.token_count > self.sequence_length:
            return None
        return (
            f"the {self.split} split has {self.token_count} tokens, less than one sample of {self.sequence_length} + "
            "1: every sample repeats the whole split"
        )

    def _map_stream(self) -> None:
        """Maps the stream to runs of neighbouring documents, which takes memory per run, not per document."""
        corpus_of_run, starts, lengths = [], [], []
        for number, corpus in enumerate(self._corpora):
            begin, end = document_runs(corpus, self.held_out_fraction, held_out=self.split == "held_out")
            corpus_of_run.append(np.full(len(begin), number, dtype=np.int32))
            starts.append(begin)
            lengths.append(end - begin)
        self._corpus_of_run = np.concatenate(corpus_of_run)  # [runs]
        self._run_start = np.concatenate(starts)  # [runs] token in its corpus
        self._run_offset = np.concatenate(([0], np.cumsum(np.concatenate(lengths))))  # [runs + 1] token in the stream
        self.token_count = int(self._run_offset[-1])
        if self.token_count == 0:
            documents = sum(len(corpus) for corpus in self._corpora)
            raise DataError(
                f"the {self.split} split of {', '.join(str(corpus.prefix) for corpus in self._corpora)} is empty "
                f"({documents} documents, held_out_fraction {self.held_out_fraction:g}): give more documents or change "
                "held_out_fraction"
            )

    def _places_of(self, prefix: Path, document: int) -> Iterator[tuple[int, int]]:
        """Yields the stretches of the stream that one document takes: first token, end. None if the split lacks it."""
        for number, corpus in enumerate(self._corpora):
            if corpus.prefix != prefix:
                continue
            if not 0 <= document < len(corpus):
                raise DataError(f"{prefix} has no document {document}: it has {len(corpus)}, numbered from 0")
            length = int(corpus.document_lengths[document])
            begin = int(corpus.document_offsets[document]) // corpus.dtype.itemsize
            first, stop = self._corpus_of_run.searchsorted((number, number + 1))
            run = int(first + self._run_start[first:stop].searchsorted(begin, side="right")) - 1
            if run < first or not length:
                continue
            place = begin - int(self._run_start[run]) + int(self._run_offset[run])
            if place < int(self._run_offset[run + 1]):
                yield place, place + length

    def _block(self, k: int) -> int:
        """Returns the block of the stream that sample k is."""
        assert k >= 0, f"sample {k} does not exist"
        epoch, slot = divmod(k, self.samples_per_epoch)
        return permuted_index(slot, self.samples_per_epoch, epoch_key(self.seed, epoch, self.fingerprint))

    def _read(self, begin: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Reads `count` tokens of the repeated stream from `begin` on, and where documents start among them."""
        tokens, starts = np.empty(count, dtype=np.int64), []
        done = 0
        for corpus, low, high in self._spans(begin, count):
            tokens[done : done + high - low] = corpus.tokens[low:high]
            starts.append(_starts_between(corpus, low, high) + done)
            done += high - low
        return tokens, np.concatenate(starts)

    def _spans(self, begin: int, count: int) -> Iterator[tuple[IndexedTokens, int, int]]:
        """Yields the runs that hold `count` tokens of the stream from `begin` on: (corpus, first token, end)."""
        place = begin % self.token_count
        run = int(self._run_offset.searchsorted(place, side="right")) - 1
        while count:
            low = int(self._run_start[run]) + place - int(self._run_offset[run])
            size = min(count, int(self._run_offset[run + 1]) - place)
            yield self._corpora[self._corpus_of_run[run]], low, low + size
            count, place = count - size, (place + size) % self.token_count
            run = run + 1 if place else 0

    def _check_ids(self, tokens: NDArray[np.int64], block: int) -> None:
        wrong = int(tokens.view(np.uint64).max())  # as unsigned numbers, negative ids are the largest of all
        if wrong >= self._id_limit:
            names = ", ".join(str(corpus.prefix) for corpus in self._corpora)
            where = f"token id {wrong if wrong < 2**63 else wrong - 2**64} in block {block} of {names} lies outside the"
            if self.vocab_size is None and wrong < 2**63:
                raise DataError(
                    f"{where} model's vocabulary of {self._id_limit}: prepare the corpus with the model's tokenizer, "
                    f"or set model.vocab_size to at least {wrong + 1}"
                )
            raise DataError(
                f"{where} vocabulary of {self.vocab_size or 'any tokenizer'}: the token file is damaged or not what "
                "its metadata says, prepare it again"
            )

    def _fingerprint(self, metas: Sequence[CorpusMeta | None]) -> str:
        contents = [
            [meta.sha256, meta.idx_sha256] if meta else [str(corpus.token_count), corpus.index_digest()]
            for corpus, meta in zip(self._corpora, metas, strict=True)
        ]
        packing = [self.sequence_length, self.split, self.held_out_fraction]
        return hashlib.sha256(json.dumps(["packed-1", contents, packing]).encode()).hexdigest()


def _starts_between(corpus: IndexedTokens, low: int, high: int) -> NDArray[np.int64]:
    """Returns where documents start among the tokens [low, high) of a corpus, counted from `low`."""
    width, offsets = corpus.dtype.itemsize, corpus.document_offsets
    first = bisect_left(offsets, low * width)  # unaligned in the file: searchsorted would copy all of it
    last = bisect_left(offsets, high * width, lo=first)
    starts: NDArray[np.int64] = offsets[first:last] // width - low
    return starts


def _packed(tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> Sample:
    """Builds the sample of `tokens` [S + 1] with documents that begin at `starts`."""
    length = len(tokens) - 1
    first, last = starts.searchsorted((1, length))
    inner = starts[first:last]
    if len(inner) > 1:  # an empty document starts where the next one does
        inner = inner[np.diff(inner, prepend=0) > 0]
    edges = np.zeros(len(inner) + 2, dtype=np.int64)
    edges[1:-1], edges[-1] = inner, length
    positions = np.arange(length) - edges[:-1].repeat(edges[1:] - edges[:-1])
    return Sample(tokens, edges.astype(np.int32), positions, bool(last < len(starts)))


def _check_arguments(prefixes: Sequence[Path], sequence_length: int, split: str, held_out_fraction: float) -> None:
    if not prefixes:
        raise DataError("no corpus is given: name at least one prefix written by `megalite prepare`")
    if sequence_length < 1:
        raise DataError(f"sequence_length {sequence_length} is impossible: it must be at least 1")
    if split not in ("train", "held_out"):
        raise DataError(f"split {split!r} does not exist: it is 'train' or 'held_out'")
    if not 0 <= held_out_fraction < 1:
        raise DataError(f"held_out_fraction {held_out_fraction:g} is impossible: it must be at least 0 and below 1")


def _matching_meta(corpus: IndexedTokens) -> CorpusMeta | None:
    meta = read_meta(corpus.prefix)
    if meta is None:
        return None
    promised = (meta.token_count, meta.document_count, meta.dtype)
    found = (corpus.token_count, len(corpus), str(corpus.dtype))
    if promised != found:
        raise DataError(
            f"{corpus.prefix}.meta.json describes another corpus (tokens, documents, dtype {promised}, found {found}): "
            "prepare it again, or delete the meta file to use the token files as they are"
        )
    return meta


def _common_vocabulary(
    corpora: Sequence[IndexedTokens], metas: Sequence[CorpusMeta | None]
) -> tuple[int | None, int | None]:
    known: dict[str, Any] = {meta.tokenizer_sha256: meta for meta in metas if meta is not None}
    if len(known) > 1:
        names = ", ".join(str(corpus.prefix) for corpus in corpora)
        raise DataError(f"the corpora {names} were made with different tokenizers: prepare them with the same one")
    for meta in known.values():
        return meta.vocab_size, meta.eos_token_id
    return None, None


# The documents of a split.


def is_held_out(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Returns [documents] bools: True where the document's hash, as a number in [0, 1), is below `fraction`."""
    return mix64(mix64(documents ^ np.uint64(_SALT))) < int(fraction * 2**64)


def document_runs(
    corpus: IndexedTokens, fraction: float, *, held_out: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the documents of a split as runs of neighbours: first token [runs] and end token [runs], no run empty."""
    firsts, ends = [], []
    for start in range(0, len(corpus), _HASHED_AT_ONCE):
        stop = min(start + _HASHED_AT_ONCE, len(corpus))
        chosen = is_held_out(np.arange(start, stop, dtype=np.uint64), fraction) == held_out
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))  # where runs begin and end, in turn
        firsts.append(edges[0::2] + start)
        ends.append(edges[1::2] + start)
    begin, end = (_first_token(corpus, np.concatenate([_NONE, *documents])) for documents in (firsts, ends))
    return begin[end > begin], end[end > begin]


def _first_token(corpus: IndexedTokens, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the first token of each document in its corpus; document len(corpus) starts at its end."""
    places = np.full(len(documents), corpus.token_count, dtype=np.int64)
    inside = documents < len(corpus)
    places[inside] = corpus.document_offsets[documents[inside]] // corpus.dtype.itemsize
    return places


# The order of an epoch.

_ROUNDS = 6
_MASK64 = 2**64 - 1
RoundKeys = tuple[int, ...]


def epoch_key(seed: int, epoch: int, fingerprint: str) -> RoundKeys:
    """Returns the round keys of one epoch of one data set; the same on every machine and in every Python."""
    digest = hashlib.blake2b(f"megalite order 1|{seed}|{epoch}|{fingerprint}".encode(), digest_size=8 * _ROUNDS)
    return struct.unpack(f"<{_ROUNDS}Q", digest.digest())


def permuted_index(index: int, size: int, key: RoundKeys) -> int:
    """Returns the image of `index` under the permutation of [0, size) that `key` defines."""
    assert 0 <= index < size, f"index {index} outside [0, {size})"
    bits = (size - 1).bit_length()
    index = _encrypt(index, bits, key)
    while index >= size:  # cycle walking: the network permutes a power of two
        index = _encrypt(index, bits, key)
    return index


def index_of_permuted(image: int, size: int, key: RoundKeys) -> int:
    """Returns the index whose image under the permutation of [0, size) that `key` defines is `image`."""
    assert 0 <= image < size, f"image {image} outside [0, {size})"
    bits = (size - 1).bit_length()
    index = _decrypt(image, bits, key)
    while index >= size:
        index = _decrypt(index, bits, key)
    return index


def _encrypt(value: int, bits: int, key: RoundKeys) -> int:
    """Encrypts a number of `bits` bits with an unbalanced Feistel network."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = value >> right_bits, value & ((1 << right_bits) - 1)
    for round_key in key:
        left, right = right, left ^ (mix64(right ^ round_key) & ((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def _decrypt(value: int, bits: int, key: RoundKeys) -> int:
    """Inverts `_encrypt`; the number of rounds is even, so both halves have their widths again at its end."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = value >> right_bits, value & ((1 << right_bits) - 1)
    for round_key in reversed(key):
        left_bits, right_bits = right_bits, left_bits
        left, right = right ^ (mix64(left ^ round_key) & ((1 << left_bits) - 1)), left
    return (left << right_bits) | right


_Integers = TypeVar("_Integers", int, NDArray[np.uint64])


def mix64(value: _Integers) -> _Integers:
    """Applies the finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    x: Any = value
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    mixed: _Integers = x ^ (x >> 31)
    return mixed
