"""What a packed sample is to a model, by definition: the slow answers that the loader's are held against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_pipeline.samples.dataset import Sample


def cu_seqlens(sample: Sample) -> NDArray[np.int64]:
    """[documents + 1] 0, every document start inside the inputs, S."""
    length = len(sample.tokens) - 1
    edges = np.concatenate(([0], sample.starts, [length]))
    return edges[:-1] if edges[-2] == length else edges  # the last target may begin a document


def positions(sample: Sample) -> NDArray[np.int64]:
    """[S] distances from the start of the document, or of the sample."""
    edges = cu_seqlens(sample)
    return np.arange(edges[-1]) - edges[:-1].repeat(edges[1:] - edges[:-1])


def target_is_valid(sample: Sample) -> NDArray[np.bool_]:
    """[S] bools: False where the target is the first token of another document, or carries no loss."""
    valid = np.ones(len(sample.tokens) - 1, dtype=np.bool_) if sample.loss is None else sample.loss[1:].copy()
    valid[sample.starts - 1] = False
    return valid
