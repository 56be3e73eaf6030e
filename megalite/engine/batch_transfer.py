"""The way of micro-batches from the host to the device.

On an accelerator all micro-batches of a step are copied when the step begins, from pinned memory and on a stream of
their own: the device is still computing the step before then, and does not stop for them. Pinned memory comes from
torch's cache, which gives a block away again only when the copy out of it has been done; so two steps never share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megalite.parallel.collectives import ContextParallel
from megalite.parallel.context import own_spans
from megalite.parallel.layers import BlockInput


class MicroBatch(Protocol):
    """The samples of one forward pass, on the host."""

    @property
    def tokens(self) -> np.ndarray: ...  # [micro_batch, seq] int64
    @property
    def targets(self) -> np.ndarray: ...  # [micro_batch, seq] int64, -100 where a token carries no loss
    @property
    def positions(self) -> np.ndarray | None: ...  # [micro_batch, seq] int64, 0 at a document's start
    @property
    def samples(self) -> np.ndarray: ...  # [micro_batch] int64, numbers in the order of the data, for dropout
    @property
    def sources(self) -> np.ndarray | None: ...  # [micro_batch] int64 of a mix, places of their sources by sorted names
    @property
    def global_valid_targets(self) -> int | None: ...  # with a loss, of the global batch; None: the replicas count them


class CutBatch(NamedTuple):
    """A `MicroBatch` with this rank's part of each sequence, `[micro_batch, seq/cp]`, and the positions of whole ones,
    which attention needs."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None
    samples: np.ndarray
    sources: np.ndarray | None
    global_valid_targets: int | None


def cut_sequences(micro_batches: Sequence[MicroBatch], cp: ContextParallel) -> Sequence[MicroBatch]:
    """Returns the micro-batches with this rank's part of their sequences."""
    cut: list[MicroBatch] = []
    for batch in micro_batches:
        spans = own_spans(batch.tokens.shape[1], cp)
        tokens, targets = (
            np.concatenate([x[:, at.start : at.stop] for at in spans], axis=1) for x in (batch.tokens, batch.targets)
        )
        cut.append(CutBatch(tokens, targets, batch.positions, batch.samples, batch.sources, batch.global_valid_targets))
    return cut


class DeviceBatch(NamedTuple):
    """A micro-batch on the device."""

    inputs: BlockInput  # of the first layer
    targets: Tensor
    sources: Tensor | None  # None without a mix


class BatchTransfer:
    """Copies micro-batches to the device; on a CPU they stay where they are."""

    def __init__(self, device: torch.device, *, has_dropout: bool) -> None:
        self._device, self._has_dropout = device, has_dropout
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> list[DeviceBatch]:
        """Returns the micro-batches on the device, for use on the current stream."""
        if self._stream is None:
            return [self._copied(batch) for batch in micro_batches]
        with torch.cuda.stream(self._stream):  # they are allocated there too, and wait for nothing
            copied = [self._copied(batch) for batch in micro_batches]
        user = torch.cuda.current_stream(self._device)
        user.wait_stream(self._stream)
        for batch in copied:
            inputs = batch.inputs
            for tensor in (inputs.hidden, inputs.positions, inputs.sample_ids, batch.targets, batch.sources):
                if tensor is not None:
                    tensor.record_stream(user)
        return copied

    def _copied(self, batch: MicroBatch) -> DeviceBatch:
        tokens, targets = self._copy(batch.tokens), self._copy(batch.targets)
        samples = self._copy(batch.samples) if self._has_dropout else None
        sources = None if batch.sources is None else self._copy(batch.sources)
        positions = documents = None
        if batch.positions is not None:
            positions = self._copy(batch.positions)
            documents = len(batch.positions) + int(np.count_nonzero(batch.positions[:, 1:] == 0))  # no device is asked
        return DeviceBatch(BlockInput(tokens, positions, samples, documents), targets, sources)

    def _copy(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._stream is not None:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
