"""Gathers of what a step has changed in the weights, in codes.

Replicas add the decoded change to the weights that they have, the owner too, so that all have the same to the bit. The
owner's fp32 weights, which the optimizer updates, are apart from those: the next change is measured against what
replicas have, so what a message leaves out goes with the next one, and nothing has to be kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import Config
from megalite.config.compression import BITS
from megalite.engine.compression.blocks import BlockCodec
from megalite.engine.compression.codec import pieces_of
from megalite.engine.deepspeed.internals import FlatGroup, flat_groups
from megalite.engine.reduction.weight_gathers import WeightGathers
from megalite.engine.step_decision import StepDecision
from megalite.parallel.collectives import ALL_GATHER
from megalite.tracing.activity import Activity, Operation


class _Change(dist.Work):
    """The change of one bucket's weights on its way, which `wait` adds to them."""

    def __init__(self, codec: BlockCodec, weights: Tensor, messages: Tensor, work: dist.Work) -> None:
        super().__init__()
        self._codec, self._weights, self._messages, self._work = codec, weights, messages, work

    @torch.no_grad()
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        sizes, count = self._codec.sizes, len(self._codec.sizes)
        for part, own in enumerate(self._weights.chunk(count)):
            wide = own.float()
            self._codec.add_decoded(self._messages.view(count, -1)[part, : sizes[part]], part, wide)
            own.copy_(wide)
        return True


class WeightChangeGathers(WeightGathers):
    """Gathers changes in place of weights."""

    def __init__(
        self, optimizer: Any, model: nn.Module, activity: Activity, used_at_once: Iterable[Tensor], bits: int
    ) -> None:
        super().__init__(optimizer, model, activity, used_at_once)
        of_weights = {group.weights: group for group in flat_groups(optimizer)}
        self._codecs = [_codecs(of_weights[weights], bits) for weights, *_ in self._buckets]

    @torch.no_grad()
    def after_step(self, decision: StepDecision) -> None:
        """Begins the gathers; a step that was skipped on the device changes nothing."""
        if decision.left_out:
            return
        self._activity.record_op(Operation.GATHER_WEIGHTS, peers=self._activity.peers.data)
        skipped = decision.skipped_on_device
        for number, (weights, partition, group) in enumerate(self._buckets, start=1):
            replicas, rank = dist.get_world_size(group), dist.get_rank(group)
            own = weights.chunk(replicas)[rank]
            if replicas == 1:  # of experts that nobody else holds
                own.copy_(partition)
                continue
            codec, of_own = self._codecs[number - 1]
            change = partition - own.float()
            if skipped is not None:
                change.masked_fill_(skipped.bool(), 0.0)
            messages = torch.empty(replicas * max(codec.sizes), dtype=torch.uint8, device=weights.device)
            mine = messages.chunk(replicas)[rank]
            mine[: of_own.sizes[0]] = of_own.encode(change)
            work = getattr(dist, ALL_GATHER)(messages, mine, group=group, async_op=True)
            self._pending[number] = _Change(codec, weights, messages, work)
        self.settle(self._used_at_once)


def _codecs(group: FlatGroup, bits: int) -> tuple[BlockCodec, BlockCodec]:
    """Returns the codec of all parts of a bucket, and that of this rank's alone."""
    slices = [(start := group.start(each), start + each.numel()) for each in group.parameters]
    pieces = pieces_of(slices, len(group.weights), dist.get_world_size(group.replicas))
    device = group.weights.device
    return BlockCodec(pieces, bits, device), BlockCodec([pieces[dist.get_rank(group.replicas)]], bits, device)


def weight_gathers(
    config: Config, optimizer: Any, model: nn.Module, activity: Activity, used_at_once: Iterable[Tensor]
) -> WeightGathers:
    """Returns the gathers of a config."""
    if (kind := config.compression.weights) == "none":
        return WeightGathers(optimizer, model, activity, used_at_once)
    return WeightChangeGathers(optimizer, model, activity, used_at_once, BITS[kind])
