"""The way of tokens to expert-parallel ranks, which have a layer's experts between them, and back.

In: this rank's rows `[rows, hidden]`, grouped by expert, of all experts. Out: the rows of all ranks that go to this
rank's experts, grouped by expert; and on the way back the experts' outputs in the places of the rows. No row is dropped
and none is padded, so ranks tell each other first how many they send. The gradient of either way is the other way.

Every rank of the group must come by with the same layer of the same micro-batch: replicas run one program, and a rank
without a row takes part with none. Tensor-parallel ranks each send their copy of the rows, to that rank of the other
replicas which has the same features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import RankGroup


class RowMessages(NamedTuple):
    """The numbers of rows that one rank exchanges with the ranks of a group."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    group: dist.ProcessGroup

    def to_experts(self, rows: Tensor, order: Tensor) -> Tensor:
        """`[sent rows, ...]` -> `[received rows, ...]`, grouped by expert."""
        arrived = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), self.received, self.sent, group=self.group)
        return arrived[order]

    def to_tokens(self, rows: Tensor, order: Tensor) -> Tensor:
        """Undoes `to_experts`."""
        leaving = torch.empty_like(rows)
        leaving[order] = rows
        returned = rows.new_empty(sum(self.sent), *rows.shape[1:])
        dist.all_to_all_single(returned, leaving, self.sent, self.received, group=self.group)
        return returned


def _exchanged_counts(ends: Tensor, experts: RankGroup) -> tuple[RowMessages, Tensor, Tensor]:
    """Takes where the rows of all experts end, `[experts]`; returns the messages, the order that groups arriving rows
    by expert, `[received]` int64, and where the rows of each of this rank's experts end then, int32. Collective.

    The host must know the sizes of messages and waits for the device here, once in each forward of a layer. So does one
    that is run again: counts that are kept would have to outlive all micro-batches that a pipeline holds.
    """
    assert experts.group is not None
    counts = ends.diff(prepend=ends.new_zeros(1)).view(experts.size, -1)  # [ranks, own experts]
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=experts.group)
    sent, received = torch.stack((counts, arriving)).sum(dim=2).tolist()
    numbers = torch.arange(counts.shape[1], device=ends.device).repeat(experts.size)
    expert_of_row = numbers.repeat_interleave(arriving.flatten(), output_size=sum(received))
    own_ends = arriving.sum(dim=0).cumsum(0, dtype=torch.int32)
    return RowMessages(sent, received, experts.group), expert_of_row.argsort(stable=True), own_ends


class _SendToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, messages: RowMessages) -> Tensor:
        ctx.save_for_backward(order)
        ctx.messages = messages
        return messages.to_experts(rows, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.messages.to_tokens(grad, *ctx.saved_tensors), None, None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, messages: RowMessages) -> Tensor:
        ctx.save_for_backward(order)
        ctx.messages = messages
        return messages.to_tokens(rows, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.messages.to_experts(grad, *ctx.saved_tensors), None, None


def through_experts(
    compute: Callable[[Tensor, Tensor], Tensor], rows: Tensor, ends: Tensor, experts: RankGroup
) -> Tensor:
    """Returns what all ranks' experts make of this rank's rows, `[rows, hidden]`, which `ends` `[experts]` deals to
    them. `compute` applies this rank's experts to rows and where those of each end."""
    messages, order, own_ends = _exchanged_counts(ends, experts)
    outputs = compute(_SendToExperts.apply(rows, order, messages), own_ends)
    return _SendBack.apply(outputs, order, messages)
