"""The messages between pipeline stages: static shapes, one tensor each, asynchronous both ways.

A message is the hidden states, or their gradient. Positions and sample ids, where a model has them, travel in the bytes
before the hidden states, which begin at a multiple of 16 bytes: GEMMs read them faster, compiled blocks without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.deepspeed.process_groups import group_among
from megalite.parallel.layers import BlockInput
from megalite.schedules.program import Message, MessageKind


@dataclass(frozen=True)
class MessageLayout:
    """Shapes of what stages exchange for one micro-batch."""

    hidden: tuple[int, int, int]  # [batch, seq(/tp), hidden]
    dtype: torch.dtype
    device: torch.device
    positions: tuple[int, int] | None = None  # [batch, seq]; None if there are none
    sample_ids: tuple[int] | None = None  # [batch]; None if there are none

    def new_buffer(self, kind: MessageKind) -> Tensor:
        """Returns an uninitialised message."""
        if kind is MessageKind.GRADIENT or not self._riders:
            return torch.empty(self.hidden, dtype=self.dtype, device=self.device)
        size = self._rider_bytes + math.prod(self.hidden) * self.dtype.itemsize
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pack(self, x: BlockInput) -> Tensor:
        """Returns the message that carries a block's input."""
        present = [shape is not None for shape in (self.positions, self.sample_ids)]
        assert present == [part is not None for part in x[1:3]], "positions and sample ids differ from what config says"
        if not any(present):
            return x.hidden.detach()
        message = self.new_buffer(MessageKind.ACTIVATION)
        for mine, theirs in zip(self.unpack(message)[:3], x[:3], strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
        return message

    def unpack(self, message: Tensor) -> BlockInput:
        """Returns the block's input in a message, as views of it."""
        if not self._riders:
            return BlockInput(message)
        end, views = 0, []
        for shape in (self.positions, self.sample_ids):
            begin, end = end, end + (0 if shape is None else 8 * math.prod(shape))
            views.append(None if shape is None else message[begin:end].view(torch.int64).view(shape))
        positions, sample_ids = views
        return BlockInput(message[self._rider_bytes :].view(self.dtype).view(self.hidden), positions, sample_ids)

    @property
    def _riders(self) -> list[tuple[int, ...]]:
        return [shape for shape in (self.positions, self.sample_ids) if shape is not None]

    @property
    def _rider_bytes(self) -> int:
        return -(-sum(8 * math.prod(shape) for shape in self._riders) // 16) * 16


class PipelineGroups:
    """The process groups of one pipeline's messages: in each a rank sends to one neighbour, or receives from one.

    A process group of NCCL runs one message after the other, whoever it is for (`device_id` of `init_process_group`).
    A send to the stage behind would wait for a reception from the stage before that was begun earlier. So the pairs of
    neighbours are dealt to two sets, three in a ring of odd length, in which no rank is twice, each with a group for
    either direction: four or six groups, however many stages there are.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], pairs: set[tuple[int, int]]) -> None:
        """`pipelines` are the ranks of each pipeline by stage, `pairs` the stages (source, target) between which
        messages pass. Collective over all ranks."""
        self.ranks = next(ranks for ranks in pipelines if dist.get_rank() in ranks)
        self._stage = self.ranks.index(dist.get_rank())
        self._kind_of = {pair: (_set_of(*pair, len(self.ranks)), pair[0] < pair[1]) for pair in pairs}
        self._groups = {kind: group_among(pipelines) for kind in sorted(set(self._kind_of.values()))}

    def open(self, device: torch.device) -> None:
        """Sends one byte from the first to the second stage of each pair, in one order; collective over the pipeline.

        Without `device_id` NCCL connects a pair at its first message and waits for both ranks, but stages begin with
        different messages.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for source, target in sorted(self._kind_of):
            if self._stage == source:
                dist.send(byte, dst=self.ranks[target], group=self._group(source, target))
            elif self._stage == target:
                dist.recv(byte, src=self.ranks[source], group=self._group(source, target))

    def all(self) -> list[dist.ProcessGroup]:
        """Returns the groups."""
        return list(self._groups.values())

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[self._kind_of[source, target]]

    def send(self, message: Message, tensor: Tensor) -> dist.Work:
        """Begins to send `tensor`, which must stay as it is until the work is done."""
        group = self._group(message.source, message.target)
        work = dist.isend(tensor, dst=self.ranks[message.target], group=group)
        assert work is not None
        return work

    def receive(self, message: Message, tensor: Tensor) -> dist.Work:
        """Begins to receive into `tensor`."""
        group = self._group(message.source, message.target)
        work = dist.irecv(tensor, src=self.ranks[message.source], group=group)
        assert work is not None
        return work


def _set_of(source: int, target: int, stages: int) -> int:
    """Deals pairs of neighbours in a ring of stages to sets in which no stage is twice."""
    first, last = min(source, target), max(source, target)
    if last - first == 1:
        return first % 2
    return 2 if stages % 2 else 1  # the pair that closes the ring
