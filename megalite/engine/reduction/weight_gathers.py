"""Gathers of the weights that replicas of ZeRO-1 and ZeRO-2 have updated, beside the next forward.

All begin when a step is over, in the order in which forward uses the buckets. Forward waits for a bucket before the
first layer that has a weight in it, whoever else reads weights for all of them: `Engine.parameters` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.deepspeed.internals import flat_groups
from megalite.engine.deepspeed.step import flat_partitions
from megalite.engine.step_decision import StepDecision
from megalite.engine.step_participant import StepParticipant
from megalite.parallel.collectives import ALL_GATHER
from megalite.tracing.activity import Activity, Operation


class WeightGathers(StepParticipant):
    """Makes the weights of one rank whole, on the groups of gradients and in one order with them on all replicas."""

    def __init__(self, optimizer: Any, model: nn.Module, activity: Activity, used_at_once: Iterable[Tensor]) -> None:
        """optimizer: DeepSpeed's. `used_at_once` are weights that somebody reads before the next forward."""
        self._activity, self._used_at_once = activity, list(used_at_once)
        groups, partitions = flat_groups(optimizer), flat_partitions(optimizer)
        places = {parameter: place for place, group in enumerate(groups) for parameter in group.parameters}
        order = list(dict.fromkeys(places[parameter] for parameter in model.parameters() if parameter in places))
        self._buckets = [(groups[place].weights, partitions[place], groups[place].replicas) for place in order]
        self._number_of: dict[Tensor, int] = {parameter: order.index(place) + 1 for parameter, place in places.items()}
        self._pending: dict[int, dist.Work] = {}  # by the number of the bucket
        for layer in model.modules():
            if hasattr(layer, "layer_name"):  # called eagerly: a block is compiled inside of it
                layer.register_forward_pre_hook(lambda each, _: self.settle(each.parameters()))

    @torch.no_grad()
    def after_step(self, decision: StepDecision) -> None:
        """Begins the gathers, also of a step that was skipped on the device: they share what was there."""
        if decision.left_out:
            return
        self._activity.record_op(Operation.GATHER_WEIGHTS, peers=self._activity.peers.data)
        for number, (weights, partition, group) in enumerate(self._buckets, start=1):
            own = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
            own.copy_(partition)
            self._pending[number] = getattr(dist, ALL_GATHER)(weights, own, group=group, async_op=True)
        self.settle(self._used_at_once)

    def settle(self, weights: Iterable[Tensor] | None = None) -> None:
        """Waits until weights are whole, by default all of them: on CUDA the current stream does, not the host."""
        if not self._pending:
            return
        numbers = self._pending.keys() if weights is None else {self._number_of.get(each) for each in weights}
        for number in sorted(self._pending.keys() & numbers):
            with self._activity.interruption(Operation.GATHER_WEIGHTS, number, self._activity.peers.data):
                self._pending.pop(number).wait()
