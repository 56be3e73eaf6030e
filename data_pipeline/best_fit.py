"""Samples of whole documents: `data.packing: best_fit`.

A sample is one bin of a plan that `packing_plan.py` has computed: pieces of documents side by side, the longest first,
and padding where no piece fits. Each piece is a document for attention and positions. So is the padding, whose targets
carry no loss. Bins never hold pieces of two corpora. Epoch e visits all bins of all corpora in the order of a computed
permutation, so that sample k is a pure function of (fingerprint, seed, k) here too.
"""

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.dataset import SAMPLES_KEPT, CorpusSamples, DocumentRange, Sample, check_ids
from data_pipeline.errors import DataError
from data_pipeline.indexed import IndexedTokens
from data_pipeline.packing_plan import RULE, PackingPlan, PackingRequest
from data_pipeline.stream import Split

_MUCH_PADDING = 0.01  # of all tokens, from which on the user is told


class BestFitSamples(CorpusSamples):
    """Samples of the bins of each corpus, in which documents are whole as far as they fit."""

    packing_rule = RULE

    def _open_split(self, split: Split) -> int:
        self._bin = lru_cache(maxsize=SAMPLES_KEPT)(self._find_bin)
        self._plans = [
            PackingPlan(PackingRequest(corpus, content[-1], self.sequence_length, split, self.held_out_fraction))
            for corpus, content in zip(self._corpora, self._contents, strict=True)
        ]
        self._first_bin = np.cumsum([0, *(plan.bin_count for plan in self._plans)]).tolist()  # [corpora + 1]
        self.samples_per_epoch = self._first_bin[-1]
        return sum(plan.token_count for plan in self._plans)

    def sample(self, k: int) -> Sample:
        """Returns sample number k >= 0 of the run, counted over all epochs."""
        corpus, firsts, sizes = self._bin(k)
        ends = np.cumsum(sizes)
        parts = [corpus.read(first, end) for first, end in zip(firsts.tolist(), (firsts + sizes).tolist(), strict=True)]
        padding = np.full(self.sequence_length + 1 - int(ends[-1]), self.eos_token_id or 0, dtype=corpus.dtype)
        tokens = np.concatenate([*parts, padding])
        check_ids(tokens, self._id_limit, self.vocab_size, [corpus], f"sample {k}")
        if not len(padding):
            return Sample(tokens, ends[:-1])
        return Sample(tokens, ends, np.arange(len(tokens)) < ends[-1])

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k carry loss: of each piece, all tokens but the first; reads no tokens."""
        _, _, sizes = self._bin(k)
        return int(sizes.sum()) - len(sizes)

    def documents(self, k: int) -> list[DocumentRange]:
        """Returns the documents that sample k holds tokens of, in the order of the sample."""
        corpus, firsts, _ = self._bin(k)
        every = range(len(corpus))
        # the last of the documents that start at or before a token's place holds the token
        numbers = [
            bisect_right(every, first, key=lambda i: int(corpus.starts(i, i)[0])) - 1 for first in firsts.tolist()
        ]
        return [DocumentRange(corpus.prefix, number, number) for number in numbers]

    def samples_of(self, prefix: Path, document: int, epoch: int) -> list[int]:
        """Returns the samples of an epoch that hold tokens of one document of a corpus, in rising order."""
        bins = set[int]()
        for corpus, plan, first_bin in zip(self._corpora, self._plans, self._first_bin, strict=False):
            if corpus.prefix != prefix:
                continue
            if not 0 <= document < len(corpus):
                raise DataError(f"{prefix} has no document {document}: it has {len(corpus)}, numbered from 0")
            begin, end = corpus.starts(document, document + 1).tolist()
            bins.update(first_bin + number for number in plan.bins_between(begin, end))
        return self._samples_in(bins, epoch)

    def notice(self) -> str | None:
        """Returns a notice for the user if much of the samples is padding."""
        slots = self.samples_per_epoch * (self.sequence_length + 1)
        padding = 1 - sum(plan.placed_tokens for plan in self._plans) / slots
        if padding < _MUCH_PADDING:
            return None
        return (
            f"{padding:.1%} of the {self.split} split's samples is padding, because its documents leave gaps that no "
            "other one fits: another sequence_length, or data.packing concat, wastes less"
        )

    def _find_bin(self, k: int) -> tuple[IndexedTokens, NDArray[np.int64], NDArray[np.int64]]:
        """Returns what sample k is made of: the corpus, and first token and length of each piece."""
        number = self._block(k)
        which = bisect_right(self._first_bin, number) - 1
        return self._corpora[which], *self._plans[which].bin(number - self._first_bin[which])
