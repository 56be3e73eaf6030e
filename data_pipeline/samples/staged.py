"""Samples read in parts, for a stage of a run whose sequences are shorter than the longest of the run.

The order of a run is one of samples of the longest length, cut into as many parts as sequences fit in: sequence r is
part r mod parts of sample r // parts. A part takes one more token, the target of its last input, which is the first
input of the next part. So the parts of a sample have the targets of the whole, each once, and a step that reads whole
samples leaves no gap and repeats nothing, whichever length comes before or behind it.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_pipeline.samples.dataset import Sample, SampleRows
from data_pipeline.samples.samples import Samples

_KEPT = 8  # samples, whose parts are read one after the other


class CutSamples:
    """Samples of which each is cut into `parts` sequences of equal length, as the loader reads them."""

    def __init__(self, samples: Samples, parts: int) -> None:
        assert samples.sequence_length % parts == 0, (samples.sequence_length, parts)
        self.sequence_length, self.has_loss_mask = samples.sequence_length // parts, samples.has_loss_mask
        self.dtype, self.id_limit = samples.dtype, samples.id_limit
        self._samples, self._parts = samples, parts
        self._whole = lru_cache(maxsize=_KEPT)(samples.sample)

    def sample(self, r: int) -> Sample:
        """Returns sequence number r >= 0 of the run."""
        k, part = divmod(r, self._parts)
        whole, length = self._whole(k), self.sequence_length
        begin, end = part * length, (part + 1) * length
        starts = whole.starts[(whole.starts > begin) & (whole.starts <= end)] - begin
        loss = None if whole.loss is None else whole.loss[begin : end + 1]
        return Sample(whole.tokens[begin : end + 1], starts, loss)

    def read_row(self, r: int, rows: SampleRows, row: int) -> None:
        """Reads sequence number r into a row of a micro-batch."""
        sample = self.sample(r)
        rows.tokens[row] = sample.tokens
        if sample.loss is not None:
            rows.without_loss.append(np.flatnonzero(~sample.loss[1:]) + row * self.sequence_length)
        if rows.finds_starts or sample.loss is not None:
            rows.add_starts(row, sample.starts, carry_loss=sample.loss is None)

    def sources_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the source of each of these sequences, as in `Samples`."""
        return self._samples.sources_of(numbers // self._parts)

    def count_valid_targets_between(self, first: int, stop: int) -> int:
        """Returns how many targets of the sequences [first, stop) carry loss: all parts of some samples, as in a step.

        Parts have the targets of the whole, so that no tokens are read, as of samples that are not cut.
        """
        assert first % self._parts == stop % self._parts == 0, (first, stop, self._parts)
        return self._samples.count_valid_targets_between(first // self._parts, stop // self._parts)
