"""The interface of a run's samples for those who read them, whichever way they are packed or mixed."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.samples.dataset import DocumentRange, Sample, SampleRows
from data_pipeline.samples.token_stream import Split


class ReadSamples(Protocol):
    """The samples of one split of prepared text in the order of a run, as a loader reads them.

    Sample k is a pure function of (fingerprint, seed, k), so that a loader, an evaluation and an audit need no other
    state.
    """

    sequence_length: int
    has_loss_mask: bool  # some tokens carry no loss, even where all documents are one
    dtype: np.dtype[Any]  # an integer type that holds the tokens of all corpora
    id_limit: int  # token ids from here on are refused

    def sample(self, k: int) -> Sample:
        """Returns sample number k >= 0 of the run, counted over all epochs."""

    def read_row(self, k: int, rows: SampleRows, row: int) -> None:
        """Reads sample k into a row of a micro-batch, where it takes much less time than `sample`.

        Whoever reads rows holds their ids against `id_limit`; `sample` says what is wrong with one.
        """

    def count_valid_targets_between(self, first: int, stop: int) -> int:
        """Returns how many targets of the samples [first, stop) carry loss; reads no tokens."""

    def sources_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the source of each of these samples `[B]`, by its place among the names of a mix, or None."""


class Samples(ReadSamples, Protocol):
    """Samples of which a run and an audit also know where they come from."""

    seed: int
    split: Split
    fingerprint: str  # of the content, the split and the packing; the seed is not in it
    samples_per_epoch: int
    token_count: int  # of the split
    vocab_size: int | None  # None if the corpora have no metadata
    eos_token_id: int | None
    content_digest: str  # of pieces of the tokens that the fingerprint does not know, empty if there are none

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
