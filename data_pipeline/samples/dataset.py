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
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError, first_names
from data_pipeline.samples.corpus_checks import (
    check_arguments,
    common_vocabulary,
    content_digests,
    matching_meta,
    sampled_digest,
)
from data_pipeline.samples.order import epoch_key, index_of_permuted, permuted_range
from data_pipeline.samples.token_stream import Split, StreamPiece, TokenStream, split_streams
from data_pipeline.storage.indexed import IndexedTokens

SAMPLES_KEPT = 4096  # whose places are not looked up again: their targets are counted, then they are read
_AT_ONCE = 256  # samples whose blocks are computed together

TooLong = Literal["refuse", "skip", "cut"]
"""Choices for conversations, documents with a loss mask, that are longer than a sample; text is always cut."""


@dataclass(frozen=True)
class Sample:
    """One packed sequence of S tokens and the token that follows it."""

    tokens: NDArray[np.integer[Any]]  # [S + 1] as the corpus stores them; inputs are [:-1], targets [1:]
    starts: NDArray[np.int64]  # [n] places from 1 to S where documents begin, rising
    loss: NDArray[np.bool_] | None = None  # [S + 1] whether a token carries loss as a target; None: every token does


class SampleRows:
    """B samples side by side, as a micro-batch takes them; `Samples.read_row` fills them one by one."""

    def __init__(self, count: int, sequence_length: int, dtype: np.dtype[Any], *, finds_starts: bool) -> None:
        self.finds_starts = finds_starts  # somebody asks where documents begin
        self.tokens = np.empty((count, sequence_length + 1), dtype=dtype)  # [B, S + 1]
        self.without_loss: list[slice | NDArray[np.int64]] = []  # places among the targets [B * S] that carry no loss
        self._length = sequence_length
        self._starts, self._shifts = [np.empty(0, dtype=np.int64)], [0]  # of each call of `add_starts`

    def add_starts(self, row: int, starts: NDArray[np.int64], *, carry_loss: bool = True) -> None:
        """Adds the places 1 to S of a row where documents begin; without `carry_loss` they are no targets."""
        self._starts.append(starts)
        self._shifts.append(row * self._length)
        if not carry_loss:
            self.without_loss.append(starts + (row * self._length - 1))

    def document_starts(self) -> NDArray[np.int64]:
        """Returns the places row * S + 1 to (row + 1) * S where documents begin, in the order in which they came."""
        counts = [len(starts) for starts in self._starts]
        return np.concatenate(self._starts) + np.array(self._shifts, dtype=np.int64).repeat(counts)


@dataclass(frozen=True)
class DocumentRange:
    """A range of neighbouring documents of a corpus."""

    prefix: Path | str  # a text is the URL of which the files are a copy
    first: int  # number of the document in the corpus, from 0
    last: int  # the same as `first` where it is one

    def __str__(self) -> str:
        which = f"document {self.first}" if self.first == self.last else f"documents {self.first} to {self.last}"
        return f"{which} of {self.prefix}"


class CorpusSamples:
    """One split of one or more opened corpora, and the order of its samples: what all packings have in common.

    A packing makes `samples_per_epoch` blocks of tokens, which each epoch visits in another order.
    """

    samples_per_epoch: int
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
        plan_cache: Path | None = None,  # as in `PackingRequest`
    ) -> None:
        check_arguments(prefixes, sequence_length, split, held_out_fraction)
        self.sequence_length, self.seed, self.split = sequence_length, seed, split
        self.held_out_fraction, self.too_long, self.plan_cache = held_out_fraction, too_long, plan_cache
        self._corpora = [IndexedTokens(prefix) for prefix in prefixes]
        metas = [matching_meta(corpus) for corpus in self._corpora]
        self.vocab_size, self.eos_token_id = common_vocabulary(self._corpora, metas)
        self.dtype = np.result_type(*{corpus.dtype for corpus in self._corpora})
        self.id_limit = min(2**63 if size is None else size for size in (self.vocab_size, vocab_limit))
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
        self._blocks = lru_cache(maxsize=32)(self._find_blocks)
        self.token_count = self._open_split(split)
        if self.token_count == 0:
            documents = sum(len(corpus) for corpus in self._corpora)
            raise DataError(
                f"the {split} split of {first_names([str(corpus.prefix) for corpus in self._corpora])} is empty "
                f"(documents: {documents}, held_out_fraction {self.held_out_fraction:g}): give more documents or "
                "change data.held_out_fraction (of `megalite evaluate` --held-out-fraction)"
            )

    def _open_split(self, split: Split) -> int:
        """Sets up the blocks of the split; returns its number of tokens."""
        raise NotImplementedError

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k carry loss; reads no tokens."""
        raise NotImplementedError

    def count_valid_targets_between(self, first: int, stop: int) -> int:
        """Returns how many targets of the samples [first, stop) carry loss; reads no tokens."""
        return sum(map(self.count_valid_targets, range(first, stop)))

    def sources_of(self, numbers: NDArray[np.int64]) -> None:
        """Returns None: these samples are those of one source."""

    def _block(self, k: int) -> int:
        """Returns the block that sample k is."""
        assert k >= 0, f"sample {k} does not exist"
        return self._blocks(k // _AT_ONCE)[k % _AT_ONCE]

    def _find_blocks(self, group: int) -> list[int]:
        """Returns the blocks of `_AT_ONCE` samples, which may be of several epochs."""
        blocks, size = list[int](), self.samples_per_epoch
        while (missing := _AT_ONCE - len(blocks)) > 0:
            epoch, first = divmod(group * _AT_ONCE + len(blocks), size)
            blocks += permuted_range(first, min(first + missing, size), size, self._round_keys(epoch))
        return blocks

    def _samples_in(self, blocks: set[int], epoch: int) -> list[int]:
        """Returns the samples of an epoch that are these blocks, in rising order."""
        key, size = self._round_keys(epoch), self.samples_per_epoch
        return sorted(epoch * size + index_of_permuted(block, size, key) for block in blocks)


class PackedSamples(CorpusSamples):
    """Samples of the corpora as one stream, cut wherever a sample is full."""

    packing_rule = "packed-1"

    @cached_property
    def _streams(self) -> dict[Split, TokenStream]:
        return split_streams(self._corpora, [content[-1] for content in self._contents], self.held_out_fraction)

    def _open_split(self, split: Split) -> int:
        if self.has_loss_mask and self.too_long != "cut":
            raise DataError(
                f"{self._corpora[0].prefix} holds conversations, nearly all of which data.packing concat cuts: choose "
                "data.packing best_fit, or data.too_long cut"
            )
        self._stream = self._streams[split]
        stream, length = self._stream, self.sequence_length
        self._pieces = lru_cache(maxsize=SAMPLES_KEPT)(lambda k: stream.pieces(self._block(k) * length, length + 1))
        count = self._stream.token_count
        self.samples_per_epoch = max(1, -(-(count - 1) // self.sequence_length))
        return count

    def sample(self, k: int) -> Sample:
        """Returns sample number k >= 0 of the run, counted over all epochs."""
        pieces, tokens = self._pieces(k), np.empty(self.sequence_length + 1, dtype=self.dtype)
        _read_pieces(pieces, tokens)
        check_ids(tokens, self.id_limit, self.vocab_size, self._corpora, f"sample {k}")
        return Sample(tokens, _starts(pieces), self._loss(pieces))

    def read_row(self, k: int, rows: SampleRows, row: int) -> None:
        """Reads sample k into a row of a micro-batch; its ids are not checked."""
        pieces = self._pieces(k)
        _read_pieces(pieces, rows.tokens[row])
        loss = self._loss(pieces)
        if loss is not None:
            rows.without_loss.append(np.flatnonzero(~loss[1:]) + row * self.sequence_length)
        if rows.finds_starts or loss is not None:
            for piece in pieces:
                if piece.begins:
                    rows.add_starts(row, piece.starts, carry_loss=loss is None)

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k carry loss, and are no first token of a document; reads no tokens."""
        pieces = self._pieces(k)
        loss = self._loss(pieces)
        if loss is None:
            return self.sequence_length - sum(piece.starts.size for piece in pieces)
        loss[_starts(pieces)] = False
        return int(np.count_nonzero(loss[1:]))

    def documents(self, k: int) -> list[DocumentRange]:
        """Returns the documents that sample k holds tokens of, its last target included, in the order of the stream.

        Empty documents are left out.
        """
        ranges, before = list[DocumentRange](), None
        for piece in self._pieces(k):
            first = piece.first_document
            if before and before.corpus is piece.corpus and before.high == piece.low:  # of the next block
                first = ranges.pop().first
            ranges.append(DocumentRange(piece.corpus.prefix, first, piece.last_document))
            before = piece
        return ranges

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

    def _loss(self, pieces: Sequence[StreamPiece]) -> NDArray[np.bool_] | None:
        """Reads which tokens of a sample carry loss; those of a corpus without a mask all do."""
        if not self.has_loss_mask:
            return None
        return np.concatenate([piece.corpus.read_loss(piece.low, piece.high) for piece in pieces])


def _read_pieces(pieces: Sequence[StreamPiece], tokens: NDArray[np.integer[Any]]) -> None:
    """Fills `tokens` [S + 1] with those of the pieces."""
    if len(pieces) == 1:
        pieces[0].corpus.read_into(pieces[0].low, tokens)
        return
    for piece in pieces:
        piece.corpus.read_into(piece.low, tokens[piece.done : piece.done + piece.high - piece.low])


def _starts(pieces: Sequence[StreamPiece]) -> NDArray[np.int64]:
    return pieces[0].starts if len(pieces) == 1 else np.concatenate([piece.starts for piece in pieces])


def ids_are_below(limit: int, tokens: NDArray[np.integer[Any]]) -> bool:
    """True if no id of an array of any shape is negative or reaches `limit`."""
    return bool(tokens.max() < limit and (tokens.dtype.kind == "u" or tokens.min() >= 0))


def check_ids(
    tokens: NDArray[np.integer[Any]],
    limit: int,
    vocab_size: int | None,  # of the tokenizer, None if it is not known
    corpora: Sequence[IndexedTokens],
    place: str,
) -> None:
    """Raises DataError if an id is negative or not below `limit`; `place` says where in the corpora they are from."""
    if ids_are_below(limit, tokens):
        return
    lowest, highest = int(tokens.min()), int(tokens.max())
    wrong = highest if highest >= limit else lowest
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
