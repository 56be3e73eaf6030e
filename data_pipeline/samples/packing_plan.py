"""The plan of best-fit packing: which pieces of documents share a sample, computed once and kept beside the tokens.

A bin is what one sample holds: S + 1 tokens, S = sequence_length, of which the first S are inputs and the last S are
targets. A document of at most S + 1 tokens is one piece and is never cut. A longer one is cut into pieces of S + 1
tokens that begin S tokens apart: the last target of a piece is the first input of the next one. So every token but the
first of its document is a target exactly once, and a piece of n tokens has n - 1 targets.

Pieces are packed best-fit decreasing: the longest first, each into the fullest bin that has room for it, and of equally
full bins into the one that has been so full for the longest time. Lengths are small integers, so whole groups of equal
bins take whole groups of equal pieces at once: O(n log n) for the sorting, O(S log S) steps for the rest.

`PREFIX.pack-S-SPLIT-FRACTION.npy` is one array of int64, which ranks read at places and never compute:

    identity[4]                 SHA-256 of the rule's version, the index, S, the split and held_out_fraction
    bins, tokens, placed        numbers of bins, of tokens in the split, and of tokens in all pieces
    longer                      number of documents in the split that are longer than a bin
    pieces[...]                 first token in the corpus << 23 | number of tokens, bin after bin
    edges[bins + 1]             first piece of each bin, and the number of pieces
"""

import hashlib
import io
import json
import os
import socket
from bisect import bisect_left, bisect_right, insort
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.ownership import only_we_write
from data_pipeline.samples.order import is_held_out
from data_pipeline.samples.token_stream import Split
from data_pipeline.storage.file_io import RandomAccessFile, write_atomically
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.paths import with_ending

RULE = "best-fit-1"  # another name for every change that would pack the same documents otherwise
_REMEDY = "write it with `megalite data pack CONFIG.yaml`"
_LENGTH_BITS = 23  # beside 40 bits of the first token; together below the sign
_LONGEST_PIECE, _MOST_TOKENS = 2**_LENGTH_BITS - 1, 2**40
_HEADER_WORDS = 8
_AT_ONCE = 1 << 20  # documents or pieces


@dataclass(frozen=True)
class PackingRequest:
    """Everything that the plan of one corpus depends on."""

    corpus: IndexedTokens
    index_sha256: str  # of its .idx
    sequence_length: int
    split: Split
    held_out_fraction: float
    leaves_out_longer: bool = False  # documents that are longer than a bin are left out, not cut
    cache: Path | None = None  # where plans of corpora lie whose folders this user may not write

    @property
    def path(self) -> Path:
        """The plan's file: beside the tokens, or in `cache` if one lies there that nobody else can have written."""
        own, options = self.path_in_cache, (self.sequence_length, self.split, self.held_out_fraction)
        with suppress(OSError):  # of a cache that may not be entered: the plan may lie beside the tokens
            if own is not None and own.is_file() and only_we_write(own.parent) and only_we_write(own):
                return own
        return with_ending(self.corpus.prefix, plan_ending(*options, self.leaves_out_longer))

    @property
    def path_in_cache(self) -> Path | None:
        """The file in `cache`, named after the corpus and everything that the plan depends on."""
        if self.cache is None:
            return None
        name = f"{self.corpus.prefix.name}-{self.identity.tobytes().hex()[:32]}.npy"
        return self.cache / f"packing-{os.geteuid()}" / name

    @property
    def identity(self) -> NDArray[np.int64]:
        held_out, is_left_out = float(self.held_out_fraction), self.leaves_out_longer
        facts = [RULE, self.index_sha256, self.sequence_length, self.split, held_out, is_left_out]
        return np.frombuffer(hashlib.sha256(json.dumps(facts).encode()).digest(), dtype="<i8")


def plan_ending(sequence_length: int, split: Split, held_out_fraction: float, leaves_out_longer: bool) -> str:
    """Returns the end of the name of a plan's file, after the prefix of its corpus."""
    whole = "-whole" if leaves_out_longer else ""
    return f".pack-{sequence_length}-{split}-{float(held_out_fraction)}{whole}.npy"


class PackingPlan:
    """The bins of one split of one corpus. Opening it reads the header; bins are read when asked for.

    Raises DataError if there is no plan, or one that is damaged or was written for something else.
    """

    def __init__(self, request: PackingRequest) -> None:
        path = request.path
        if not path.is_file():
            missing, remedy = f"{path} does not exist", _REMEDY
            if (in_cache := request.path_in_cache) is not None:
                missing = f"{path} and {in_cache} do not exist here, on {socket.gethostname()}"
                remedy += ", on each host that has a data.cache of its own"
            raise DataError(
                f"{request.corpus.prefix} has no plan of best-fit packing for the {request.split} split with "
                f"sequence_length {request.sequence_length} and held_out_fraction {request.held_out_fraction:g} ("
                f"{missing}): {remedy}"
            )
        try:
            with path.open("rb") as stream:
                np.lib.format.read_magic(stream)
                (words,), _, dtype = np.lib.format.read_array_header_1_0(stream)
                self._begin = stream.tell()
        except ValueError as error:
            raise DataError(f"{path} is not readable as a plan of packing ({error}): {_REMEDY}") from error
        self._file = RandomAccessFile(path)
        is_whole = dtype == np.int64 and words >= _HEADER_WORDS and self._file.size == self._begin + 8 * words
        if not is_whole:
            raise DataError(f"{path} is no plan of packing, or cut off: {_REMEDY}")
        header = self._words(0, _HEADER_WORDS)
        if not np.array_equal(header[:4], request.identity):
            raise DataError(
                f"{path} was written for another index than {request.corpus.prefix}.idx, or by another version of "
                f"megalite: {_REMEDY}"
            )
        self.bin_count, self.token_count, self.placed_tokens, self.longer_documents = header[4:].tolist()
        self.piece_count = words - _HEADER_WORDS - self.bin_count - 1
        self._edges_at = _HEADER_WORDS + self.piece_count

    def bin(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the pieces of a bin: their first tokens in the corpus and their lengths, [pieces] each."""
        begin, end = self._words(self._edges_at + number, 2).tolist()
        pieces = self._words(_HEADER_WORDS + begin, end - begin)
        return pieces >> _LENGTH_BITS, pieces & _LONGEST_PIECE

    def bins_between(self, first: int, end: int) -> list[int]:
        """Returns the bins with pieces that begin at the tokens [first, end) of the corpus; reads all pieces once."""
        found = []
        for begin in range(0, self.piece_count, _AT_ONCE):
            pieces = self._words(_HEADER_WORDS + begin, min(_AT_ONCE, self.piece_count - begin))
            inside = (pieces >= first << _LENGTH_BITS) & (pieces < end << _LENGTH_BITS)
            found += (np.flatnonzero(inside) + begin).tolist()
        edges = range(self.bin_count + 1)
        return [
            bisect_right(edges, piece, key=lambda at: int(self._words(self._edges_at + at, 1)[0])) - 1
            for piece in found
        ]

    def _words(self, place: int, count: int) -> NDArray[np.int64]:
        words = np.empty(count, dtype=np.int64)
        self._file.read(self._begin + 8 * place, words.data)
        return words


def write_plan(request: PackingRequest, path: Path | None = None) -> PackingPlan:
    """Computes the plan of `request` and writes its file whole, or not at all; takes about 80 bytes per piece.

    `path` is that of the request, if none is given.
    """
    corpus, capacity = request.corpus, request.sequence_length + 1
    if capacity > _LONGEST_PIECE or corpus.token_count > _MOST_TOKENS:
        raise DataError(
            f"{corpus.prefix} ({corpus.token_count:,} tokens, sequence_length {request.sequence_length:,}) is too "
            f"large for a plan of packing: prepare it as several corpora of at most {_MOST_TOKENS:,} tokens each, and "
            f"use a sequence_length below {_LONGEST_PIECE:,}"
        )
    starts, sizes, token_count, longer = _pieces_of_split(request)
    order, edges = best_fit_bins(sizes, capacity)
    header = np.array([*request.identity.tolist(), len(edges) - 1, token_count, sizes.sum(), longer], dtype=np.int64)
    content = io.BytesIO()
    np.save(content, np.concatenate([header, (starts << _LENGTH_BITS | sizes)[order], edges]))
    write_atomically(path or request.path, content.getvalue())
    return PackingPlan(request)


def _pieces_of_split(request: PackingRequest) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int]:
    """Returns first tokens and lengths [pieces] of the split, in file order, its tokens and its long documents."""
    corpus, stride = request.corpus, request.sequence_length
    empty = np.empty(0, dtype=np.int64)
    starts, sizes, token_count, longer = [empty], [empty], 0, 0
    for first in range(0, len(corpus), _AT_ONCE):
        stop = min(first + _AT_ONCE, len(corpus))
        begins = corpus.starts(first, stop)
        lengths = np.diff(begins)
        is_chosen = is_held_out(np.arange(first, stop, dtype=np.uint64), request.held_out_fraction) == (
            request.split == "held_out"
        )
        chosen = np.flatnonzero(is_chosen & (lengths > 0))
        longer += int(np.count_nonzero(lengths[chosen] > stride + 1))
        if request.leaves_out_longer:
            chosen = chosen[lengths[chosen] <= stride + 1]
        lengths = lengths[chosen]
        counts = np.maximum(1, -(-(lengths - 1) // stride))  # pieces of each document
        offsets = (np.arange(counts.sum()) - (np.cumsum(counts) - counts).repeat(counts)) * stride  # in the document
        starts.append(begins[chosen].repeat(counts) + offsets)
        sizes.append(np.minimum(stride + 1, lengths.repeat(counts) - offsets))
        token_count += int(lengths.sum())
    return np.concatenate(starts), np.concatenate(sizes), token_count, longer


def best_fit_bins(sizes: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Packs pieces of `sizes` [pieces], 1 to `capacity`, into bins.

    Returns the pieces in the order of the bins, [pieces], and the place of each bin's first piece there, [bins + 1].
    """
    kind = np.uint16 if capacity < 2**16 else np.int32  # 16 bits are sorted in linear time
    longest_first = np.argsort((capacity - sizes).astype(kind), kind="stable")
    bin_of = np.empty(len(sizes), dtype=np.int64)  # [pieces] in that order
    counts = np.bincount(sizes, minlength=capacity + 1)
    open_bins: dict[int, deque[NDArray[np.int64]]] = {}  # by free tokens, those that have had them longest first
    free_sizes: list[int] = []  # keys of `open_bins`, rising
    bin_count = done = 0

    def keep(bins: NDArray[np.int64], free: int, *, at_front: bool = False) -> None:
        if not len(bins) or not free:
            return
        if free not in open_bins:
            open_bins[free] = deque()
            insort(free_sizes, free)
        (open_bins[free].appendleft if at_front else open_bins[free].append)(bins)

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            place = bisect_left(free_sizes, size)
            if place < len(free_sizes):
                free = free_sizes[place]
                bins = open_bins[free].popleft()
                if not open_bins[free]:
                    del open_bins[free], free_sizes[place]
            else:
                free = capacity
                bins = np.arange(bin_count, bin_count - (-left // (capacity // size)))
                bin_count += len(bins)
            # a bin that has taken one piece stays the fullest with room, until no other piece of the size fits
            each = free // size
            filled, rest = divmod(min(left, each * len(bins)), each)
            bin_of[done : done + filled * each] = bins[:filled].repeat(each)
            keep(bins[:filled], free - each * size)
            if rest:
                bin_of[done + filled * each : done + filled * each + rest] = bins[filled]
                keep(bins[filled : filled + 1], free - rest * size)
            keep(bins[filled + bool(rest) :], free, at_front=True)
            left -= filled * each + rest
            done += filled * each + rest
    order = longest_first[np.argsort(bin_of, kind="stable")]
    return order, np.concatenate(([0], np.cumsum(np.bincount(bin_of, minlength=bin_count))))
