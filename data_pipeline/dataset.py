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
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError, first_names
from data_pipeline.indexed import IndexedTokens
from data_pipeline.meta import CorpusMeta, read_meta
from data_pipeline.stream import Split, StreamPiece, TokenStream, split_streams

SAMPLES_KEPT = 4096  # whose places are not looked up again: their targets are counted, then they are read

TooLong = Literal["refuse", "skip", "cut"]
"""Choices for conversations, documents with a loss mask, that are longer than a sample; text is always cut."""


@dataclass(frozen=True)
class Sample:
    """One packed sequence of S tokens and the token that follows it."""

    tokens: NDArray[np.integer[Any]]  # [S + 1] as the corpus stores them; inputs are [:-1], targets [1:]
    starts: NDArray[np.int64]  # [n] places from 1 to S where documents begin, rising
    loss: NDArray[np.bool_] | None = None  # [S + 1] whether a token carries loss as a target; None: every token does

    @property
    def cu_seqlens(self) -> NDArray[np.int64]:
        """[documents + 1] 0, every document start inside the inputs, S."""
        length = len(self.tokens) - 1
        edges = np.empty(len(self.starts) + 2, dtype=np.int64)
        edges[0], edges[1:-1], edges[-1] = 0, self.starts, length
        return edges[:-1] if edges[-2] == length else edges  # the last target may begin a document

    @property
    def positions(self) -> NDArray[np.int64]:
        """[S] distances from the start of the document, or of the sample."""
        edges = self.cu_seqlens
        return np.arange(edges[-1]) - edges[:-1].repeat(edges[1:] - edges[:-1])

    @property
    def target_is_valid(self) -> NDArray[np.bool_]:
        """[S] bools: False where the target is the first token of another document, or carries no loss."""
        valid = np.ones(len(self.tokens) - 1, dtype=np.bool_) if self.loss is None else self.loss[1:].copy()
        valid[self.starts - 1] = False
        return valid


@dataclass(frozen=True)
class DocumentRange:
    """A range of neighbouring documents of a corpus."""

    prefix: Path | str  # a text is the URL of which the files are a copy
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
    has_loss_mask: bool  # some tokens carry no loss, even where all documents are one
    content_digest: str  # of pieces of the tokens that the fingerprint does not know, empty if there are none

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


class CorpusSamples:
    """One split of one or more opened corpora, and the order of its samples: what all packings have in common.

    A packing makes `samples_per_epoch` blocks of tokens, which each epoch visits in another order.
    """

    fingerprint: str  # of the content, the split and the packing; the seed is not in it
    samples_per_epoch: int
    token_count: int  # of the split
    vocab_size: int | None  # None if the corpora have no metadata
    eos_token_id: int | None
    has_loss_mask: bool
    content_digest: str
    packing_rule: ClassVar[str]  # enters the fingerprint: another one for blocks that would be cut otherwise

    def __init__(
        self,
        prefixes: Sequence[Path],
        sequence_length: int,
        seed: int,
        split: Split = "train",
        held_out_fraction: float = 0.01,
        *,
        vocab_limit: int | None = None,  # of the model: larger ids are refused
        too_long: TooLong = "refuse",
    ) -> None:
        check_arguments(prefixes, sequence_length, split, held_out_fraction)
        self.sequence_length, self.seed, self.split = sequence_length, seed, split
        self.held_out_fraction, self.too_long = held_out_fraction, too_long
        self._corpora = [IndexedTokens(prefix) for prefix in prefixes]
        metas = [matching_meta(corpus) for corpus in self._corpora]
        self.vocab_size, self.eos_token_id = common_vocabulary(self._corpora, metas)
        self._id_limit = min(2**63 if size is None else size for size in (self.vocab_size, vocab_limit))
        self._contents = content_digests(self._corpora, metas)
        self.has_loss_mask = any(corpus.has_loss_mask for corpus in self._corpora)
        self.content_digest = sampled_digest(self._corpora, metas)
        self._take(split)

    def of_split(self, split: Split) -> Self:
        """Returns the samples of the other split of the same corpora, which are not opened again."""
        other = copy(self)
        other._take(split)
        return other

    def _take(self, split: Split) -> None:
        """Sets what depends on the split."""
        self.split = split
        rule, packing = self.packing_rule, list[object]((self.sequence_length, split, self.held_out_fraction))
        if self.has_loss_mask and self.too_long == "skip":
            packing.append(self.too_long)
        self.fingerprint = hashlib.sha256(json.dumps([rule, self._contents, packing]).encode()).hexdigest()
        self._round_keys = lru_cache(maxsize=4)(partial(epoch_key, self.seed, fingerprint=self.fingerprint))
        self.token_count = self._open_split(split)
        if self.token_count == 0:
            documents = sum(len(corpus) for corpus in self._corpora)
            raise DataError(
                f"the {split} split of {first_names([str(corpus.prefix) for corpus in self._corpora])} is empty "
                f"({documents} documents, held_out_fraction {self.held_out_fraction:g}): give more documents or change "
                "held_out_fraction"
            )

    def _open_split(self, split: Split) -> int:
        """Sets up the blocks of the split; returns its number of tokens."""
        raise NotImplementedError

    def _block(self, k: int) -> int:
        """Returns the block that sample k is."""
        assert k >= 0, f"sample {k} does not exist"
        epoch, slot = divmod(k, self.samples_per_epoch)
        return permuted_index(slot, self.samples_per_epoch, self._round_keys(epoch))

    def _samples_in(self, blocks: set[int], epoch: int) -> list[int]:
        """Returns the samples of an epoch that are these blocks, in rising order."""
        key, size = self._round_keys(epoch), self.samples_per_epoch
        return sorted(epoch * size + index_of_permuted(block, size, key) for block in blocks)


class PackedSamples(CorpusSamples):
    """Samples of the corpora as one stream, cut wherever a sample is full."""

    packing_rule = "packed-1"

    @cached_property
    def _streams(self) -> dict[Split, TokenStream]:
        return split_streams(self._corpora, self.held_out_fraction)

    def _open_split(self, split: Split) -> int:
        if self.has_loss_mask and self.too_long != "cut":
            raise DataError(
                f"{self._corpora[0].prefix} holds conversations, nearly all of which data.packing concat cuts: choose "
                "data.packing best_fit, or data.too_long cut"
            )
        self._stream = self._streams[split]
        self._pieces = lru_cache(maxsize=SAMPLES_KEPT)(self._find_pieces)
        count = self._stream.token_count
        self.samples_per_epoch = max(1, -(-(count - 1) // self.sequence_length))
        return count

    def sample(self, k: int) -> Sample:
        """Returns sample number k >= 0 of the run, counted over all epochs."""
        pieces = self._pieces(k)
        parts = [piece.corpus.read(piece.low, piece.high) for piece in pieces]
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        check_ids(tokens, self._id_limit, self.vocab_size, self._corpora, f"sample {k}")
        return Sample(tokens, _starts(pieces), self._loss(pieces))

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k carry loss, and are no first token of a document; reads no tokens."""
        pieces = self._pieces(k)
        starts, loss = _starts(pieces), self._loss(pieces)
        if loss is None:
            return self.sequence_length - len(starts)
        loss[starts] = False
        return int(np.count_nonzero(loss[1:]))

    def documents(self, k: int) -> list[DocumentRange]:
        """Returns the documents that sample k holds tokens of, its last target included, in the order of the stream.

        Empty documents are left out.
        """
        pieces = self._pieces(k)
        return [DocumentRange(piece.corpus.prefix, piece.first_document, piece.last_document) for piece in pieces]

    def samples_of(self, prefix: Path, document: int, epoch: int) -> list[int]:
        """Returns the samples of an epoch that hold tokens of one document of a corpus, in rising order."""
        size, blocks = self.samples_per_epoch, set[int]()
        for begin, end in self._stream.places_of(prefix, document):
            while begin <= size * self.sequence_length:  # the last blocks wrap around to the start of the stream
                first = max(0, -(-begin // self.sequence_length) - 1)  # a block holds one token of the next
                blocks.update(range(first, min(size, (end - 1) // self.sequence_length + 1)))
                begin, end = begin + self.token_count, end + self.token_count
        return self._samples_in(blocks, epoch)

    def notice(self) -> str | None:
        """Returns a notice for the user if the split is smaller than one sample."""
        if self.token_count > self.sequence_length:
            return None
        return (
            f"the {self.split} split has {self.token_count} tokens, less than one sample of {self.sequence_length} + "
            "1: every sample repeats the whole split"
        )

    def _find_pieces(self, k: int) -> list[StreamPiece]:
        return self._stream.pieces(self._block(k) * self.sequence_length, self.sequence_length + 1)

    def _loss(self, pieces: Sequence[StreamPiece]) -> NDArray[np.bool_] | None:
        """Reads which tokens of a sample carry loss; those of a corpus without a mask all do."""
        if not self.has_loss_mask:
            return None
        return np.concatenate([piece.corpus.read_loss(piece.low, piece.high) for piece in pieces])


def _starts(pieces: Sequence[StreamPiece]) -> NDArray[np.int64]:
    return pieces[0].starts if len(pieces) == 1 else np.concatenate([piece.starts for piece in pieces])


def check_ids(
    tokens: NDArray[np.integer[Any]],
    limit: int,
    vocab_size: int | None,  # of the tokenizer, None if it is not known
    corpora: Sequence[IndexedTokens],
    place: str,
) -> None:
    """Raises DataError if an id is negative or not below `limit`; `place` says where in the corpora they are from."""
    wrong = int(np.maximum.reduce(tokens))
    if wrong < limit:
        wrong = 0 if tokens.dtype.kind == "u" else int(np.minimum.reduce(tokens))
        if wrong >= 0:
            return
    names = first_names([str(corpus.prefix) for corpus in corpora])
    where = f"token id {wrong} in {place} of {names} lies outside the"
    if vocab_size is None and wrong >= 0:
        raise DataError(
            f"{where} model's vocabulary of {limit}: prepare the corpus with the model's tokenizer, or set "
            f"model.vocab_size to at least {wrong + 1}"
        )
    raise DataError(
        f"{where} vocabulary of {vocab_size or 'any tokenizer'}: the token file is damaged or not what its metadata "
        "says, prepare it again"
    )


def check_arguments(prefixes: Sequence[Path], sequence_length: int, split: str, held_out_fraction: float) -> None:
    if not prefixes:
        raise DataError("no corpus is given: name at least one prefix written by `megalite prepare`")
    if sequence_length < 1:
        raise DataError(f"sequence_length {sequence_length} is impossible: it must be at least 1")
    if split not in ("train", "held_out"):
        raise DataError(f"split {split!r} does not exist: it is 'train' or 'held_out'")
    if not 0 <= held_out_fraction < 1:
        raise DataError(f"held_out_fraction {held_out_fraction:g} is impossible: it must be at least 0 and below 1")


def matching_meta(corpus: IndexedTokens) -> CorpusMeta | None:
    """Returns the metadata of a corpus, None if it has none; only then is the whole index read, and checked."""
    meta = read_meta(corpus.prefix)
    check_loss_mask(corpus, meta)
    if meta is None:
        corpus.check()
        return None
    promised = (meta.token_count, meta.document_count, meta.dtype)
    found = (corpus.token_count, len(corpus), str(corpus.dtype))
    if promised != found:
        raise DataError(
            f"{corpus.prefix}.meta.json describes another corpus (tokens, documents, dtype {promised}, found {found}): "
            "prepare it again, or delete the meta file to use the token files as they are"
        )
    corpus.trust()
    return meta


def check_loss_mask(corpus: IndexedTokens, meta: CorpusMeta | None) -> None:
    """Raises DataError if the mask that the metadata names is missing, or one is there that it does not name."""
    is_named = meta is not None and meta.loss_sha256 is not None
    if is_named and not corpus.has_loss_mask:
        raise DataError(f"{corpus.prefix}.loss.bin, the loss mask of the corpus, is missing: prepare the corpus again")
    if corpus.has_loss_mask and not is_named:
        raise DataError(
            f"{corpus.prefix}.loss.bin is a loss mask that no {corpus.prefix}.meta.json names, so that it may be of "
            "other tokens: prepare the corpus again, or move the mask away to train on every token"
        )


def content_digests(corpora: Sequence[IndexedTokens], metas: Sequence[CorpusMeta | None]) -> list[list[str]]:
    """Returns what tells each corpus's content from another's; the last of each is the SHA-256 of its index."""
    return [
        _promised_digests(meta) if meta else [str(corpus.token_count), corpus.index_digest()]
        for corpus, meta in zip(corpora, metas, strict=True)
    ]


def _promised_digests(meta: CorpusMeta) -> list[str]:
    return [meta.sha256, *([meta.loss_sha256] if meta.loss_sha256 else []), meta.idx_sha256]


def sampled_digest(corpora: Sequence[IndexedTokens], metas: Sequence[CorpusMeta | None]) -> str:
    """Returns a digest of tokens here and there in corpora without metadata, of which `content_digests` knows lengths.

    Empty if all have metadata. It is no part of the fingerprint, so that older runs keep theirs.
    """
    found = [corpus.sampled_digest() for corpus, meta in zip(corpora, metas, strict=True) if meta is None]
    return hashlib.sha256("".join(found).encode()).hexdigest() if found else ""


def common_vocabulary(
    corpora: Sequence[IndexedTokens], metas: Sequence[CorpusMeta | None]
) -> tuple[int | None, int | None]:
    known: dict[str, Any] = {meta.tokenizer_sha256: meta for meta in metas if meta is not None}
    if len(known) > 1:
        names = ", ".join(str(corpus.prefix) for corpus in corpora)
        raise DataError(f"the corpora {names} were made with different tokenizers: prepare them with the same one")
    for meta in known.values():
        return meta.vocab_size, meta.eos_token_id
    return None, None


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
        mixed = right ^ round_key  # then mix64, without a call per round: this loop is a sixth of a sample's time
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
        left, right = right, left ^ ((mixed ^ (mixed >> 31)) & ((1 << left_bits) - 1))
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


def mix64(value: int) -> int:
    """Applies the finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
