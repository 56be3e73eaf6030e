"""Embedding and head that share a weight and lie on different ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.step_decision import StepDecision
from megalite.engine.step_participant import StepParticipant
from megalite.tracing.activity import Activity, Operation


class TiedHead:
    """A tied head on another rank than its embedding: a copy of that weight, and the sum of its gradients.

    The copy is a plain tensor, no parameter, so that nobody shards, steps, counts or saves it.
    """

    is_fp32 = True  # with `sum_of` what a head's loss needs of `SumsGradients`

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        parameter = module.weight
        assert isinstance(parameter, nn.Parameter)
        self.name: str = parameter.shard.name  # type: ignore[attr-defined]
        del module.weight
        is_trained = parameter.requires_grad
        self.weight = module.weight = parameter.detach().to(device, dtype).requires_grad_(is_trained)
        self._gradient: Tensor | None = None
        self._received = 0  # gradients in it
        if is_trained:
            self.weight.gradient_sums = self  # type: ignore[attr-defined]
            self.weight.register_post_accumulate_grad_hook(self._add)

    def sum_of(self, weight: Tensor) -> Tensor:
        if self._gradient is None:
            self._gradient = torch.zeros_like(weight, dtype=torch.float32)
        return self._gradient

    def _add(self, weight: Tensor) -> None:
        if weight.grad is not None:  # else the head's loss has added it
            self.sum_of(weight).add_(weight.grad)
        self._received += 1
        weight.grad = None

    def take_gradient(self, micro_batches: int) -> Tensor:
        """Returns the sum over a step's micro-batches, `[vocab/tp, hidden]`. Raises RuntimeError if one never came."""
        gradient, received, self._gradient, self._received = self._gradient, self._received, None, 0
        if gradient is None or received < micro_batches:
            raise RuntimeError(f"only {received} of {micro_batches} gradients of the tied head {self.name} came")
        return gradient


class TiedWeight(StepParticipant):
    """A weight that another rank holds too, on one of the two."""

    def __init__(self, name: str, weight: Tensor, group: dist.ProcessGroup, activity: Activity) -> None:
        """weight: what the model computes with, `[vocab/tp, hidden]`. group: of both ranks."""
        self.name, self.weight, self.group, self._activity = name, weight, group, activity
        self.ranks = tuple(dist.get_process_group_ranks(group))  # of the embedding, then of the head

    @torch.no_grad()
    def share(self) -> None:
        """Copies the embedding's weight to the head's rank, as every change demands; collective over the two."""
        self._activity.record_op(Operation.UNITE_TIED_WEIGHTS, peers=self.ranks)
        dist.broadcast(self.weight.data, src=self.ranks[0], group=self.group)

    def after_step(self, decision: StepDecision) -> None:
        if self.weight.requires_grad:
            self.share()
