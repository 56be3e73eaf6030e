"""The documents of a split as one stream of tokens, and where in the corpora each of its places lies.

A document is held out if a hash of its number is small. Nothing is stored per document: the streams know how many of
their tokens each block of 1,024 documents holds, and a block that is read is hashed and looked up in the index again.
That takes 8 bytes per 1,024 documents and split, and one pass over the index for both splits.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.indexed import IndexedTokens
from data_pipeline.order import MIXING

_SALT = np.uint64(0x6D6567616C697465)  # "megalite"
_BLOCK = 1 << 10  # documents
_COUNTED_AT_ONCE = 1 << 14  # documents, a multiple of a block; their hashes stay in the processor's cache
_BLOCKS_KEPT = 512  # per stream; up to 24 KiB each

Split = Literal["train", "held_out"]


class StreamBlock(NamedTuple):
    """The documents of a split among 1,024 neighbours of a corpus, without the empty ones."""

    corpus: IndexedTokens
    offsets: NDArray[np.int64]  # [documents + 1] place of each in the stream, and the end of the last
    shifts: NDArray[np.int64]  # [documents] first token in the corpus - place in the stream; never falls
    numbers: NDArray[np.int64]  # [documents] numbers in the corpus
    offset_view: memoryview  # of the two arrays: bisect reads single numbers of a view in half the time
    shift_view: memoryview


class StreamPiece(NamedTuple):
    """Tokens [low, high) of a corpus, neighbours in the stream too."""

    corpus: IndexedTokens
    low: int
    high: int
    done: int  # tokens of the stretch that was asked for before this piece
    block: StreamBlock
    first: int  # of the block's documents
    stop: int  # behind the last of them

    @property
    def starts(self) -> NDArray[np.int64]:
        """The places where documents begin, counted from where the stretch asked for begins, which is left out."""
        offsets = self.block.offsets
        place = self.low - self.block.shift_view[self.first]  # of the piece in the stream
        return offsets[self.first + (not self.done) : self.stop] + (self.done - place)

    @property
    def start_count(self) -> int:
        """The number of `starts`."""
        return self.stop - self.first - (not self.done)  # a later piece begins with a document

    @property
    def first_document(self) -> int:
        return self.block.numbers.item(self.first)

    @property
    def last_document(self) -> int:
        return self.block.numbers.item(self.stop - 1)


class TokenStream:
    """The tokens of all documents of a split, in the order of corpora and documents."""

    def __init__(
        self,
        corpora: Sequence[IndexedTokens],
        first_block: NDArray[np.int64],  # [corpora + 1]
        block_tokens: NDArray[np.int64],  # [blocks] tokens of the split
        fraction: float,
        *,
        held_out: bool,
    ) -> None:
        self._corpora, self._first_block = corpora, first_block
        self._fraction, self._held_out = fraction, held_out
        self._offsets = np.concatenate(([0], np.cumsum(block_tokens)))  # [blocks + 1] places in the stream
        self._offset_view = self._offsets.data
        self.token_count = int(self._offsets[-1])
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._look_up)

    def pieces(self, begin: int, count: int) -> list[StreamPiece]:
        """Returns the pieces that `count` tokens of the endlessly repeated stream from `begin` on are made of."""
        found: list[StreamPiece] = []
        done = 0
        while done < count:
            place = (begin + done) % self.token_count
            block = self._block(bisect_right(self._offset_view, place) - 1)
            offsets, shifts = block.offset_view, block.shift_view
            first = bisect_right(offsets, place) - 1
            end = min(place + count - done, offsets[-1])
            stop = bisect_left(offsets, end, first)  # documents [first, stop)
            shift = shifts[first]
            if shifts[stop - 1] != shift:  # documents of the other split lie between
                stop = bisect_right(shifts, shift, first, stop)
                end = offsets[stop]
            found.append(StreamPiece(block.corpus, place + shift, end + shift, done, block, first, stop))
            done += end - place
        return found

    def places_of(self, prefix: Path, document: int) -> Iterator[tuple[int, int]]:
        """Yields the stretches of the stream that one document takes: first token, end. None if the split lacks it."""
        for which, corpus in enumerate(self._corpora):
            if corpus.prefix != prefix:
                continue
            corpus.check_document(document)
            block = self._block(int(self._first_block[which]) + document // _BLOCK)
            place = int(block.numbers.searchsorted(document))
            if place < len(block.numbers) and block.numbers[place] == document:
                yield int(block.offsets[place]), int(block.offsets[place + 1])

    def _look_up(self, block: int) -> StreamBlock:
        which = int(self._first_block.searchsorted(block, side="right")) - 1
        corpus = self._corpora[which]
        first = (block - int(self._first_block[which])) * _BLOCK
        stop = min(first + _BLOCK, len(corpus))
        starts = corpus.starts(first, stop)
        held_out = is_held_out(np.arange(first, stop, dtype=np.uint64), self._fraction)
        inside = np.flatnonzero((held_out == self._held_out) & (starts[1:] > starts[:-1]))
        begins = starts[inside]
        offsets = np.empty(len(inside) + 1, dtype=np.int64)
        offsets[0] = 0
        np.cumsum(starts[inside + 1] - begins, out=offsets[1:])
        offsets += self._offsets[block]
        shifts = begins - offsets[:-1]
        return StreamBlock(corpus, offsets, shifts, inside + first, offsets.data, shifts.data)


def split_streams(corpora: Sequence[IndexedTokens], fraction: float) -> dict[Split, TokenStream]:
    """Returns the streams of both splits, after one pass over the index."""
    counts = [_count_tokens(corpus, fraction) for corpus in corpora]
    whole, held_out = (np.concatenate(parts) for parts in zip(*counts, strict=True))
    first_block = np.cumsum([0, *(len(part) for part, _ in counts)])
    return {
        "train": TokenStream(corpora, first_block, whole - held_out, fraction, held_out=False),
        "held_out": TokenStream(corpora, first_block, held_out, fraction, held_out=True),
    }


def _count_tokens(corpus: IndexedTokens, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens of each block of a corpus, and those of its held-out documents: [blocks] each."""
    blocks = -(-len(corpus) // _BLOCK)
    whole, held_out = np.empty(blocks, dtype=np.int64), np.empty(blocks, dtype=np.int64)
    for first in range(0, len(corpus), _COUNTED_AT_ONCE):
        stop = min(first + _COUNTED_AT_ONCE, len(corpus))
        starts = corpus.starts(first, stop)
        some = slice(first // _BLOCK, -(-stop // _BLOCK))
        whole[some] = np.diff(starts[:-1:_BLOCK], append=starts[-1])
        chosen = np.flatnonzero(is_held_out(np.arange(first, stop, dtype=np.uint64), fraction))
        tokens = starts[chosen + 1] - starts[chosen]
        held_out[some] = np.bincount(chosen // _BLOCK, tokens, minlength=some.stop - some.start)  # exact below 2^53
    return whole, held_out


def is_held_out(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Returns [documents] bools: True where the document's hash, as a number in [0, 1), is below `fraction`.

    The hash is `mix64` of data_pipeline/order.py, applied twice.
    """
    if not fraction:
        return np.zeros(len(documents), dtype=np.bool_)
    hashes = documents ^ _SALT
    spare = np.empty_like(hashes)
    for shift, factor in (*MIXING, *MIXING):
        np.right_shift(hashes, shift, out=spare)
        np.bitwise_xor(hashes, spare, out=hashes)
        if factor is not None:
            np.multiply(hashes, factor, out=hashes)
    below: NDArray[np.bool_] = hashes < np.uint64(int(fraction * 2**64))
    return below
