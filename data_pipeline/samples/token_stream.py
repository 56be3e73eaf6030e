"""The documents of a split as one stream of tokens, and where in the corpora each of its places lies.

A document is held out if a hash of its number is small. Nothing is stored per document: the streams know how many of
their tokens each block of neighbouring documents holds, and a block that is read is hashed and looked up in the index
again. That takes 8 bytes per block, and one pass over the index for both splits, whose result `split_sizes.py` keeps.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.samples.order import is_held_out
from data_pipeline.samples.split_sizes import BLOCK, HELD_OUT_BLOCK, counts_of
from data_pipeline.storage.indexed import IndexedTokens

_BLOCKS_KEPT = 1024  # per stream; up to 6 KiB each, of a train split

Split = Literal["train", "held_out"]


class StreamBlock(NamedTuple):
    """The documents of a split among neighbours of a corpus, without the empty ones. All arrays are of int64.

    They are views, of which bisect reads single numbers in half the time that it takes with arrays of numpy.
    """

    corpus: IndexedTokens
    offsets: memoryview  # [documents + 1] place of each in the stream, and the end of the last
    shifts: memoryview  # [documents] first token in the corpus - place in the stream; never falls
    numbers: memoryview  # [documents] numbers in the corpus


class StreamPiece(NamedTuple):
    """Tokens [low, high) of a corpus, neighbours in the stream too. It keeps no block in memory."""

    corpus: IndexedTokens
    low: int
    high: int
    done: int  # tokens of the stretch that was asked for before this piece
    first_document: int
    last_document: int
    begins: bytes  # int64 places in the stream where documents begin, except for the begin of the stretch
    origin: int  # place in the stream from which `starts` counts

    @property
    def starts(self) -> NDArray[np.int64]:
        """The places where documents begin, counted from where the stretch asked for begins, which is left out."""
        return np.frombuffer(self.begins, dtype=np.int64) - self.origin


class TokenStream:
    """The tokens of all documents of a split, in the order of corpora and documents."""

    def __init__(
        self,
        corpora: Sequence[IndexedTokens],
        first_block: NDArray[np.int64],  # [corpora + 1]
        block_tokens: NDArray[np.int64],  # [blocks] tokens of the split
        fraction: float,
        split: Split,
    ) -> None:
        self._corpora, self._first_block = corpora, first_block
        self._fraction, self._held_out = fraction, split == "held_out"
        self._block_documents = HELD_OUT_BLOCK if self._held_out else BLOCK
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
            corpus, offsets, shifts, numbers = block
            first = bisect_right(offsets, place) - 1
            end = min(place + count - done, offsets[-1])
            stop = bisect_left(offsets, end, first)  # documents [first, stop)
            shift = shifts[first]
            if shifts[stop - 1] != shift:  # documents of the other split lie between
                stop = bisect_right(shifts, shift, first, stop)
                end = offsets[stop]
            begins = offsets[first + (not done) : stop].tobytes()  # a later piece begins with a document
            documents = numbers[first], numbers[stop - 1]
            found.append(StreamPiece(corpus, place + shift, end + shift, done, *documents, begins, place - done))
            done += end - place
        return found

    def places_of(self, prefix: Path, document: int) -> Iterator[tuple[int, int]]:
        """Yields the stretches of the stream that one document takes: first token, end. None if the split lacks it."""
        for which, corpus in enumerate(self._corpora):
            if corpus.prefix != prefix:
                continue
            corpus.check_document(document)
            block = self._block(int(self._first_block[which]) + document // self._block_documents)
            place = bisect_left(block.numbers, document)
            if place < len(block.numbers) and block.numbers[place] == document:
                yield block.offsets[place], block.offsets[place + 1]

    def _look_up(self, block: int) -> StreamBlock:
        which = int(self._first_block.searchsorted(block, side="right")) - 1
        corpus = self._corpora[which]
        first = (block - int(self._first_block[which])) * self._block_documents
        stop = min(first + self._block_documents, len(corpus))
        starts = corpus.starts(first, stop)
        held_out = is_held_out(np.arange(first, stop, dtype=np.uint64), self._fraction)
        inside = np.flatnonzero((held_out == self._held_out) & (starts[1:] > starts[:-1]))
        begins = starts[inside]
        offsets = np.empty(len(inside) + 1, dtype=np.int64)
        offsets[0] = 0
        np.cumsum(starts[inside + 1] - begins, out=offsets[1:])
        offsets += self._offsets[block]
        if offsets[-1] != self._offsets[block + 1]:
            raise DataError(
                f"{corpus.prefix}.idx is not the index by which its documents were counted, but its metadata is the "
                f"same: see what is wrong with `megalite data check {corpus.prefix}`, and prepare the corpus again"
            )
        return StreamBlock(corpus, offsets.data, (begins - offsets[:-1]).data, (inside + first).data)


def split_streams(
    corpora: Sequence[IndexedTokens], index_sha256s: Sequence[str], fraction: float
) -> dict[Split, TokenStream]:
    """Returns the streams of both splits; passes over the index of each corpus whose counts are not kept."""
    counts = [counts_of(corpus, digest, fraction) for corpus, digest in zip(corpora, index_sha256s, strict=True)]
    streams = dict[Split, TokenStream]()
    splits: tuple[Split, Split] = ("train", "held_out")
    for split, of_split in zip(splits, zip(*counts, strict=True), strict=True):
        first_block = np.cumsum([0, *(len(part) for part in of_split)])
        streams[split] = TokenStream(corpora, first_block, np.concatenate(of_split), fraction, split)
    return streams
