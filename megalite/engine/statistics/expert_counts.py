"""The counts of the experts' choices in one step, on the device, for the update of their bias and for the log."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.engine.batch_transfer import MicroBatch
from megalite.engine.step_decision import StepDecision
from megalite.engine.step_participant import StepParticipant
from megalite.parallel.expert_balance import PlacedBalance


class ExpertCounts(StepParticipant):
    """Holds what the routers of this rank's blocks with experts count in a step."""

    def __init__(self, placed: Sequence[PlacedBalance], device: torch.device) -> None:
        self.chosen = torch.zeros(len(placed), placed[0].balance.experts, dtype=torch.int64, device=device)
        self._entropies = torch.zeros(len(placed), device=device)  # fp32
        for row, (_, _, balance) in enumerate(placed):
            balance.chosen, balance.entropy = self.chosen[row], self._entropies[row]
        self.usage: Tensor | None = None
        """Counts of the last step for each block: how many of this rank's tokens chose each expert, and behind these
        numbers the sum over tokens of the entropy of the scores, `[blocks, experts + 1]` float64 on the device."""

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.chosen.zero_(), self._entropies.zero_()

    def after_step(self, decision: StepDecision) -> None:
        """Copies the counts, before replicas add theirs up for the bias."""
        self.usage = torch.cat([self.chosen.double(), self._entropies.double().unsqueeze(1)], dim=1)
