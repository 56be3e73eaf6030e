"""The counts of the experts' choices in one step, on the device, for the update of their bias and for the log."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.parallel.expert_balance import PlacedBalance


class ExpertCounts:
    """Holds what the routers of this rank's blocks with experts count in a step."""

    def __init__(self, placed: Sequence[PlacedBalance], device: torch.device) -> None:
        self.chosen = torch.zeros(len(placed), placed[0].balance.experts, dtype=torch.int64, device=device)
        self._entropies = torch.zeros(len(placed), device=device)  # fp32
        for row, (_, _, balance) in enumerate(placed):
            balance.chosen, balance.entropy = self.chosen[row], self._entropies[row]

    def begin_step(self) -> None:
        """Forgets what was counted before, also by a step that was run again for its report."""
        self.chosen.zero_(), self._entropies.zero_()

    def usage(self) -> Tensor:
        """Returns for each block how many tokens chose each expert, and behind these numbers the sum over tokens of the
        entropy of the scores, `[blocks, experts + 1]` float64 on the device."""
        return torch.cat([self.chosen.double(), self._entropies.double().unsqueeze(1)], dim=1)
