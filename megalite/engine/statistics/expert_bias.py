"""The counts of the experts' choices in a step, and the bias that they move: balance without a loss (Wang 2024;
DeepSeek-V3).

Routers choose by score + bias and weigh by the score alone. After each optimizer step the bias of an expert falls by
`training.router.bias_rate` if more tokens of the global batch chose it than the mean, and rises by that if fewer did;
the changes of a layer are centred. Counts are integers and so are the centred signs, so for the same choices the bias
is the same number on every layout, micro-batch and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.batch_transfer import MicroBatch
from megalite.engine.step_decision import StepDecision
from megalite.engine.step_participant import StepParticipant
from megalite.parallel.expert_balance import PlacedBalance
from megalite.tracing.activity import Activity, Operation


class ExpertCounts(StepParticipant):
    """Holds what the routers of this rank's blocks with experts count in a step."""

    def __init__(self, placed: Sequence[PlacedBalance], device: torch.device) -> None:
        self.placed = placed
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


class ExpertBias(StepParticipant):
    """The biases of this rank's blocks with experts: no parameters, equal on tensor- and data-parallel ranks."""

    def __init__(
        self, counts: ExpertCounts, rate: float, replicas: dist.ProcessGroup | None, activity: Activity
    ) -> None:
        """`replicas` are those whose choices of a step are added up in place; None for one.

        At a `rate` of 0 the biases are used, and stay.
        """
        self._rate, self._replicas, self._activity = rate, replicas, activity
        self._names = [each.bias_name for each in counts.placed]
        self._counts, self._biases = counts.chosen, torch.zeros_like(counts.chosen, dtype=torch.float32)
        for (_, _, balance), bias in zip(counts.placed, self._biases, strict=True):
            balance.bias = bias

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each block's bias, `[experts]` in place, by canonical name."""
        yield from zip(self._names, self._biases, strict=True)

    def after_step(self, decision: StepDecision) -> None:
        """Moves the biases, unless the step was not taken."""
        if not self._rate or decision.left_out:
            return
        self._activity.record_op(Operation.BALANCE_EXPERTS, peers=self._activity.peers.data)
        if self._replicas is not None:
            dist.all_reduce(self._counts, group=self._replicas)
        experts = self._counts.shape[1]
        excess = (self._counts * experts - self._counts.sum(dim=1, keepdim=True)).sign()
        centred = excess * experts - excess.sum(dim=1, keepdim=True)
        change = centred.float() * (self._rate / experts)
        skipped = decision.skipped_on_device
        self._biases -= change if skipped is None else change * (1 - skipped)
