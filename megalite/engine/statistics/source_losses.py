"""The training loss by source: sums over the tokens of one step, for each source of a mix, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalite.engine.batch_transfer import MicroBatch
from megalite.engine.step_participant import StepParticipant
from megalite.parallel.loss import IGNORED


class SourceLosses(StepParticipant):
    """Adds up the losses of a step's micro-batches on this rank by the source of their rows."""

    def __init__(self, sources: int, device: torch.device) -> None:
        # losses in nats, and valid targets; float64, in which counts stay exact when replicas add them up
        self.sums = torch.zeros(2, sources, dtype=torch.float64, device=device)

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Forgets the step before, and counts the valid targets of this one on the host, which still has them."""
        counts = np.zeros(self.sums.shape[1])
        for batch in micro_batches:
            if batch.sources is not None:
                of_rows = (batch.targets != IGNORED).sum(axis=1)
                counts += np.bincount(batch.sources, weights=of_rows, minlength=len(counts))
        on_host = torch.from_numpy(counts)
        if self.sums.is_cuda:
            on_host = on_host.pin_memory()  # or the copy would wait for the device
        self.sums[0].zero_()
        self.sums[1].copy_(on_host, non_blocking=True)

    def add(self, sources: Tensor, token_losses: Tensor) -> None:
        """Adds the losses of a micro-batch `[batch, seq]`, whose rows come from `sources` `[batch]`."""
        self.sums[0].index_add_(0, sources, token_losses.sum(dim=1, dtype=torch.float64))
