"""The documents of a split as one stream of tokens, and where in the corpora each of its places lies.

A document is held out if a hash of its number is small. Nothing is stored per document: the streams know how many of
their tokens each block of neighbouring documents holds, and a block that is read is hashed and looked up in the index
again. That takes 8 bytes per block, and one pass over the index for both splits, whose result `split_counts.py` keeps.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.samples.order import MIXING
from data_pipeline.samples.split_counts import KeptCounts
from data_pipeline.storage.indexed import IndexedTokens

_SALT = np.uint64(0x6D6567616C697465)  # "megalite"
_BLOCK = 1 << 8  # documents of a block of the train split: 2 KiB of the index are little beside a sample's tokens
_HELD_OUT_BLOCK = 1 << 11  # documents, a multiple of the other; a sample of few held-out documents spans them anyway
_COUNTED_AT_ONCE = 1 << 14  # documents, a multiple of both; their hashes stay in the processor's cache
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

    @property
    def start_count(self) -> int:
        """The number of `starts`."""
        return len(self.begins) // 8


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
        self._block_documents = _HELD_OUT_BLOCK if self._held_out else _BLOCK
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
    counts = [_counts_of(corpus, digest, fraction) for corpus, digest in zip(corpora, index_sha256s, strict=True)]
    streams = dict[Split, TokenStream]()
    splits: tuple[Split, Split] = ("train", "held_out")
    for split, of_split in zip(splits, zip(*counts, strict=True), strict=True):
        first_block = np.cumsum([0, *(len(part) for part in of_split)])
        streams[split] = TokenStream(corpora, first_block, np.concatenate(of_split), fraction, split)
    return streams


def _counts_of(
    corpus: IndexedTokens, index_sha256: str, fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens of each block of a corpus that are in the train split, and those held out: [blocks] each."""
    documents = len(corpus)
    blocks = -(-documents // _BLOCK)
    kept = KeptCounts(corpus.prefix, index_sha256, documents, fraction, blocks - (-documents // _HELD_OUT_BLOCK))
    counts = kept.read()
    if counts is None:
        train, held_out = _count_tokens(corpus, fraction)
        whole_blocks = np.arange(0, blocks, _HELD_OUT_BLOCK // _BLOCK)
        counts = np.concatenate((train, np.add.reduceat(held_out, whole_blocks) if blocks else held_out))
        kept.write(counts)
    return counts[:blocks], counts[blocks:]


def _count_tokens(corpus: IndexedTokens, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens in each 256 documents that are in the train split, and those held out: [blocks] each."""
    blocks = -(-len(corpus) // _BLOCK)
    train, held_out = np.empty(blocks, dtype=np.int64), np.empty(blocks, dtype=np.int64)
    for first in range(0, len(corpus), _COUNTED_AT_ONCE):
        stop = min(first + _COUNTED_AT_ONCE, len(corpus))
        starts = corpus.starts(first, stop)
        some = slice(first // _BLOCK, -(-stop // _BLOCK))
        chosen = np.flatnonzero(is_held_out(np.arange(first, stop, dtype=np.uint64), fraction))
        tokens = starts[chosen + 1] - starts[chosen]
        held_out[some] = np.bincount(chosen // _BLOCK, tokens, minlength=some.stop - some.start)  # exact below 2^53
        train[some] = np.diff(starts[:-1:_BLOCK], append=starts[-1]) - held_out[some]
    return train, held_out


def is_held_out(documents: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Returns [documents] bools: True where the document's hash, as a number in [0, 1), is below `fraction`.

    The hash is `mix64` of data_pipeline/samples/order.py, applied twice.
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
