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

from data_pipeline.errors import DataError
from data_pipeline.samples.dataset import SAMPLES_KEPT, CorpusSamples, DocumentRange, Sample, SampleRows, check_ids
from data_pipeline.samples.packing_plan import RULE, PackingPlan, PackingRequest
from data_pipeline.samples.token_stream import Split
from data_pipeline.storage.indexed import IndexedTokens

_MUCH_PADDING = 0.01  # of all tokens, from which on the user is told


class BestFitSamples(CorpusSamples):
    """Samples of the bins of each corpus, in which documents are whole as far as they fit."""

    packing_rule = RULE

    def _open_split(self, split: Split) -> int:
        self._bin = lru_cache(maxsize=SAMPLES_KEPT)(self._find_bin)
        self._bins_of = lru_cache(maxsize=1)(self._find_bins_of)  # one document is looked for in every epoch
        self._plans = [
            PackingPlan(
                PackingRequest(
                    corpus,
                    content[-1],
                    self.sequence_length,
                    split,
                    self.held_out_fraction,
                    corpus.has_loss_mask and self.too_long == "skip",
                    self.plan_cache,
                )
            )
            for corpus, content in zip(self._corpora, self._contents, strict=True)
        ]
        self._check_lengths()
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
        check_ids(tokens, self.id_limit, self.vocab_size, [corpus], f"sample {k}")
        starts = ends if len(padding) else ends[:-1]
        if not (len(padding) or corpus.has_loss_mask):
            return Sample(tokens, starts)
        loss = np.zeros(len(tokens), dtype=np.bool_)
        loss[: ends[-1]] = _loss(corpus, firsts, sizes)
        return Sample(tokens, starts, loss)

    def read_row(self, k: int, rows: SampleRows, row: int) -> None:
        """Reads sample k into a row of a micro-batch; its ids are not checked."""
        corpus, firsts, sizes = self._bin(k)
        tokens, length, begin = rows.tokens[row], self.sequence_length, 0
        ends = sizes.cumsum()
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            corpus.read_into(first, tokens[begin:end])
            begin = end
        if begin <= length:  # padding, whose targets carry no loss
            tokens[begin:] = self.eos_token_id or 0
            rows.without_loss.append(slice(row * length + begin - 1, (row + 1) * length))
        if corpus.has_loss_mask:
            rows.without_loss.append(np.flatnonzero(~_loss(corpus, firsts, sizes)[1:]) + row * length)
        starts = ends[:-1] if begin > length else ends
        rows.add_starts(row, starts, carry_loss=begin > length and not corpus.has_loss_mask)

    def count_valid_targets(self, k: int) -> int:
        """Returns how many targets of sample k carry loss; the first token of a piece is none. Reads no tokens."""
        corpus, firsts, sizes = self._bin(k)
        if corpus.has_loss_mask:
            return int(np.count_nonzero(_loss(corpus, firsts + 1, sizes - 1)))
        return int(sizes.sum()) - len(sizes)

    def documents(self, k: int) -> list[DocumentRange]:
        """Returns the documents that sample k holds tokens of, in the order of the sample."""
        corpus, firsts, _ = self._bin(k)
        every = range(len(corpus))
        # the last of the documents that start at or before a token's place holds the token
        starts = (bisect_right(every, first, key=lambda i: int(corpus.starts(i, i)[0])) for first in firsts.tolist())
        return [DocumentRange(corpus.prefix, number - 1, number - 1) for number in starts]

    def samples_of(self, prefix: Path, document: int, epoch: int) -> list[int]:
        """Returns the samples of an epoch that hold tokens of one document of a corpus, in rising order."""
        return self._samples_in(self._bins_of(prefix, document), epoch)

    def _find_bins_of(self, prefix: Path, document: int) -> set[int]:
        """Returns the bins of all corpora that hold tokens of a document; reads the whole plan of its corpus."""
        bins = set[int]()
        for corpus, plan, first_bin in zip(self._corpora, self._plans, self._first_bin, strict=False):
            if corpus.prefix != prefix:
                continue
            corpus.check_document(document)
            begin, end = corpus.starts(document, document + 1).tolist()
            bins.update(first_bin + number for number in plan.bins_between(begin, end))
        return bins

    def notice(self) -> str | None:
        """Returns a notice for the user if conversations are longer than a sample, or much is padding."""
        notices = []
        if longer := sum(self._longer_conversations()):
            fate = "left out" if self.too_long == "skip" else "cut"
            notices.append(
                f"{longer:,} conversations of the {self.split} split, of more than {self.sequence_length + 1:,} "
                f"tokens, are {fate} (data.too_long)"
            )
        slots = self.samples_per_epoch * (self.sequence_length + 1)
        padding = 1 - sum(plan.placed_tokens for plan in self._plans) / slots
        if padding >= _MUCH_PADDING and self.split == "train":  # held out it is the same, and wastes little
            # conversations that must stay whole cannot be packed otherwise
            other = "" if self.has_loss_mask and self.too_long != "cut" else ", or data.packing concat,"
            notices.append(
                f"{padding:.1%} of the {self.split} split's samples is padding, because its documents leave gaps that "
                f"no other one fits: another sequence_length{other} wastes less"
            )
        return "; ".join(notices) or None

    def _longer_conversations(self) -> list[int]:
        """Counts the conversations of each corpus that are longer than a sample; other documents may be cut."""
        pairs = zip(self._corpora, self._plans, strict=True)
        return [plan.longer_documents if corpus.has_loss_mask else 0 for corpus, plan in pairs]

    def _check_lengths(self) -> None:
        """Raises DataError for conversations that are longer than a sample, if they are to be refused."""
        for corpus, longer in zip(self._corpora, self._longer_conversations(), strict=True):
            if longer and self.too_long == "refuse":
                raise DataError(
                    f"{corpus.prefix} has {longer:,} conversations of more than {self.sequence_length + 1:,} tokens in "
                    f"its {self.split} split: raise training.sequence_length, or choose data.too_long skip or cut"
                )

    def _find_bin(self, k: int) -> tuple[IndexedTokens, NDArray[np.int64], NDArray[np.int64]]:
        """Returns what sample k is made of: the corpus, and first token and length of each piece."""
        number = self._block(k)
        which = bisect_right(self._first_bin, number) - 1
        return self._corpora[which], *self._plans[which].bin(number - self._first_bin[which])


def _loss(corpus: IndexedTokens, firsts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Reads which tokens of pieces carry loss, [sum of sizes]."""
    pieces = zip(firsts.tolist(), (firsts + sizes).tolist(), strict=True)
    return np.concatenate([corpus.read_loss(first, end) for first, end in pieces])
