"""Packed samples: sample k of a run is a pure function of (fingerprint, seed, k).

The documents of a split, in file order, are one stream of T tokens. An epoch cuts it into ceil((T - 1) / S)
blocks of S inputs; a block takes one more token, the target of its last input, which is also the first input
of the next block. The last block goes on at the start of the stream. So in an epoch every token but the first
is a target exactly once, and fewer than S tokens at the start are targets a second time. Epoch e visits the
blocks in the order of a computed permutation (order.py); nothing is stored per sample, and no run length,
rank or worker enters.

S = sequence_length.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.indexed import IndexedTokens
from data_pipeline.meta import CorpusMeta, read_meta
from data_pipeline.order import epoch_key, permuted_index
from data_pipeline.splits import document_runs

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Sample:
    tokens: NDArray[np.int64]  # [S + 1]; inputs are [:-1], targets [1:]
    cu_seqlens: NDArray[np.int32]  # [documents + 1] 0, every document start inside the inputs, S
    positions: NDArray[np.int64]  # [S] distance from the start of the document, or of the sample
    last_target_starts_document: bool

    @property
    def target_is_valid(self) -> NDArray[np.bool_]:
        """[S] False where the target is the first token of another document."""
        valid = np.ones(len(self.positions), dtype=np.bool_)
        valid[self.cu_seqlens[1:-1] - 1] = False
        valid[-1] = not self.last_target_starts_document
        return valid


@dataclass(frozen=True)
class DocumentRange:
    """Neighbouring documents of a corpus."""

    prefix: Path
    first: int  # number of the document in the corpus, from 0
    last: int  # the same as `first` where it is one

    def __str__(self) -> str:
        which = f"document {self.first}" if self.first == self.last else f"documents {self.first} to {self.last}"
        return f"{which} of {self.prefix}"


class PackedSamples:
    """The samples of one split of one or more corpora (several are read one after the other)."""

    fingerprint: str  # of the content, the split and the packing; the seed is not in it
    samples_per_epoch: int
    token_count: int  # of the split
    vocab_size: int | None  # None where the corpora have no meta data
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
        """Sample number k >= 0 of the run, counted over all epochs."""
        block = self._block(k)
        tokens, starts = self._read(block * self.sequence_length, self.sequence_length + 1)
        self._check_ids(tokens, block)
        return _packed(tokens, starts)

    def documents(self, k: int) -> list[DocumentRange]:
        """The documents that sample number k holds tokens of, its last target's included, in the order of the stream.

        A document is one where a token of it lies in the sample, so empty documents are none.
        """
        ranges = []
        for corpus, low, high in self._stretches(self._block(k) * self.sequence_length, self.sequence_length + 1):
            width = corpus.dtype.itemsize
            # the last of the documents that start at or before a token's place holds the token
            first = bisect_right(corpus.document_offsets, low * width) - 1
            last = bisect_right(corpus.document_offsets, (high - 1) * width) - 1
            ranges.append(DocumentRange(corpus.prefix, first, last))
        return ranges

    def notice(self) -> str | None:
        """A sentence for the user where the split is smaller than one sample."""
        if self.token_count > self.sequence_length:
            return None
        return (
            f"the {self.split} split has {self.token_count} tokens, less than one sample of "
            f"{self.sequence_length} + 1: "
            "every sample repeats the whole split"
        )

    def _map_stream(self) -> None:
        """The stream as runs of neighbouring documents: memory per run, not per document."""
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
                f"the {self.split} split of {', '.join(str(corpus.prefix) for corpus in self._corpora)} is "
                "empty "
                f"({documents} documents, held_out_fraction {self.held_out_fraction:g}): give more documents "
                "or change "
                "held_out_fraction"
            )

    def _block(self, k: int) -> int:
        """Which block of the stream sample number k is."""
        assert k >= 0, f"sample {k} does not exist"
        epoch, slot = divmod(k, self.samples_per_epoch)
        return permuted_index(slot, self.samples_per_epoch, epoch_key(self.seed, epoch, self.fingerprint))

    def _read(self, begin: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`count` tokens of the endless stream from `begin` on, and where documents start among them."""
        tokens, starts = np.empty(count, dtype=np.int64), []
        done = 0
        for corpus, low, high in self._stretches(begin, count):
            tokens[done : done + high - low] = corpus.tokens[low:high]
            width = corpus.dtype.itemsize
            offsets = corpus.document_offsets  # unaligned in the file: searchsorted would copy all of it
            first = bisect_left(offsets, low * width)
            last = bisect_left(offsets, high * width, lo=first)
            starts.append(offsets[first:last] // width + (done - low))
            done += high - low
        return tokens, np.concatenate(starts)

    def _stretches(self, begin: int, count: int) -> Iterator[tuple[IndexedTokens, int, int]]:
        """Where `count` tokens of the endless stream from `begin` on lie: (corpus, first token, end) of each run."""
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
                "its meta data says, prepare it again"
            )

    def _fingerprint(self, metas: Sequence[CorpusMeta | None]) -> str:
        contents = [
            [meta.sha256, meta.idx_sha256] if meta else [str(corpus.token_count), corpus.index_digest()]
            for corpus, meta in zip(self._corpora, metas, strict=True)
        ]
        packing = [self.sequence_length, self.split, self.held_out_fraction]
        return hashlib.sha256(json.dumps(["packed-1", contents, packing]).encode()).hexdigest()


def _packed(tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> Sample:
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
            f"{corpus.prefix}.meta.json describes another corpus (tokens, documents, dtype {promised}, found "
            f"{found}): "
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
