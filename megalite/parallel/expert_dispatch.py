"""The way of tokens to expert-parallel ranks, which have a layer's experts between them, and back.

In: this rank's rows `[rows, hidden]`, grouped by expert, of all experts. Out: the rows of all ranks that go to this
rank's experts, grouped by expert; and on the way back the experts' outputs in the places of the rows. No row is dropped
and none is padded, so ranks tell each other first how many they send. The gradient of either way is the other way.
Shared experts, which need no message, are computed while rows are under way to the others, forward and backward.

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

from megalite.parallel.collectives import Begun, RankGroup


class RowMessages(NamedTuple):
    """The numbers of rows that one rank exchanges with the ranks of a group."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    group: dist.ProcessGroup

    def to_experts(self, rows: Tensor) -> Begun:
        """`[sent rows, ...]` -> `[received rows, ...]`, by rank and then by expert."""
        return self._exchanged(rows.contiguous(), self.sent, self.received)

    def to_tokens(self, rows: Tensor) -> Begun:
        """Undoes `to_experts`."""
        return self._exchanged(rows, self.received, self.sent)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Begun:
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        return Begun(arriving, dist.all_to_all_single(arriving, rows, received, sent, self.group, async_op=True))


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


def _as_arrived(rows: Tensor, order: Tensor) -> Tensor:
    """Undoes `arrived[order]`."""
    result = torch.empty_like(rows)
    result[order] = rows
    return result


class _BeginToExperts(torch.autograd.Function):
    """Begins to send rows; what it returns is complete when `pending`, the message, has been waited for. Backward takes
    the gradient that `_EndToExperts` has begun to send back, so that others are computed between the two."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, messages: RowMessages, pending: list[Begun]) -> Tensor:
        ctx.pending = pending
        pending.append(messages.to_experts(rows))
        return pending[0].tensor

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.pending.pop().wait(), None, None


class _EndToExperts(torch.autograd.Function):
    """Waits for the message, and groups its rows by expert."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, order: Tensor, messages: RowMessages, pending: list[Begun]) -> Tensor:
        ctx.save_for_backward(order)
        ctx.messages, ctx.pending = messages, pending
        pending.pop().wait()
        return arriving[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        leaving = _as_arrived(grad, *ctx.saved_tensors)
        ctx.pending.append(ctx.messages.to_tokens(leaving))
        return leaving, None, None, None  # of the right shape; its numbers are on their way


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, messages: RowMessages) -> Tensor:
        ctx.save_for_backward(order)
        ctx.messages = messages
        return messages.to_tokens(_as_arrived(rows, order)).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return ctx.messages.to_experts(grad).wait()[order], None, None


def through_experts(
    compute: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    ends: Tensor,
    experts: RankGroup,
    beside: Callable[[], Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Returns what all ranks' experts make of this rank's rows, `[rows, hidden]`, which `ends` `[experts]` deals to
    them; and what `beside` computes while rows are under way.

    `compute` applies this rank's experts to rows and where those of each end.
    """
    messages, order, own_ends = _exchanged_counts(ends, experts)
    pending: list[Begun] = []
    arriving = _BeginToExperts.apply(rows, messages, pending)
    other = beside()
    outputs = compute(_EndToExperts.apply(arriving, order, messages, pending), own_ends)
    return _SendBack.apply(outputs, order, messages), other
