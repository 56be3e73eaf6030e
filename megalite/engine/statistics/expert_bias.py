"""The bias of the experts' choice: balance without a loss (Wang 2024; DeepSeek-V3).

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

from megalite.engine.step_decision import StepDecision
from megalite.engine.step_participant import StepParticipant
from megalite.parallel.expert_balance import PlacedBalance
from megalite.tracing.activity import Activity, Operation


class ExpertBias(StepParticipant):
    """The biases of this rank's blocks with experts: no parameters, equal on tensor- and data-parallel ranks."""

    def __init__(
        self,
        placed: Sequence[PlacedBalance],
        rate: float,
        replicas: dist.ProcessGroup | None,
        counts: Tensor,
        activity: Activity,
    ) -> None:
        """`replicas` are those whose `counts` of a step, `[blocks, experts]`, are added up in place; None for one.

        At a `rate` of 0 the biases are used, and stay.
        """
        self._rate, self._replicas, self._activity = rate, replicas, activity
        self._names = [each.bias_name for each in placed]
        self._counts, self._biases = counts, torch.zeros(counts.shape, device=counts.device)  # fp32
        for row, (_, _, balance) in enumerate(placed):
            balance.bias = self._biases[row]

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
