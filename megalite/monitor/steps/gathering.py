"""Tells neighbours when this rank came to their messages, and rank 0 what its steps spent their time on.

Everything has a fixed size that follows from the layout, so a rank that could not record its step still takes part.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from megalite.distributed.agreement import from_all_ranks
from megalite.monitor.steps.messages import Interval, MessageKey, Messages, waited_to_receive, waited_to_send
from megalite.monitor.steps.timeline import Owner
from megalite.parallel.mesh import Mesh
from megalite.schedules.tables import Schedule, placement

MEETINGS = 64  # from which clocks are compared
NEVER = Interval(math.nan, math.nan)


class ClockOffset:
    """By how much another rank's clock is ahead, from the moments in which both leave the same meetings."""

    def __init__(self, *, is_common: bool) -> None:
        self._is_common = is_common
        self._seen: deque[float] = deque(maxlen=MEETINGS)

    def add(self, own: float, other: float) -> None:
        """Takes when both left a meeting, each on its own clock; 0: none has been yet."""
        if own and other and not self._is_common:
            self._seen.append(other - own)

    @property
    def seconds(self) -> float:
        return median(self._seen) if self._seen else 0.0


class Gathering:
    """This rank's part in what ranks tell each other; its methods are collective."""

    def __init__(self, owner: Owner, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
        """`group` is of all ranks on the CPU; None for a rank alone."""
        self._owner, self._mesh, self._group = owner, mesh, group
        owners = from_all_ranks((owner.host, owner.boot), tuple[str, str])
        self.hosts = [host for host, _ in owners]
        self.stages = [mesh.coordinate(rank).pipeline_rank for rank in range(mesh.world_size)]
        self._offsets = [ClockOffset(is_common=boot == owner.boot) for _, boot in owners]
        self.expect_messages(owner)

    def expect_messages(self, owner: Owner) -> None:
        """Prepares for steps of the owner's number of micro-batches."""
        mesh, where = self._mesh, placement(Schedule(owner.schedule), owner.pipeline_parallel_size, owner.chunks)
        self._sent: dict[int, list[MessageKey]] = {}  # by the rank that gets them
        self._received: dict[int, list[MessageKey]] = {}  # by the rank that sends them
        for position, (before, after) in enumerate(pairwise(where)):
            if before == after:
                continue
            for kind, source, target, used_at in (
                ("activation", before, after, position + 1),
                ("gradient", after, before, position),
            ):
                keys = [MessageKey(kind, used_at, number) for number in range(1, owner.micro_batches + 1)]
                if source == owner.stage:
                    self._sent.setdefault(mesh.rank(target, owner.data, owner.tensor), []).extend(keys)
                elif target == owner.stage:
                    self._received.setdefault(mesh.rank(source, owner.data, owner.tensor), []).extend(keys)

    def waited(self, messages: Messages, met: float) -> float:
        """Returns for how long this rank was blocked in messages to which its neighbour had not come yet, in seconds.

        `met` is when this rank left its last meeting, 0 if there was none.
        """
        partners = sorted({*self._sent, *self._received})
        arriving, works = {}, []
        for rank in partners:
            own = [messages.sent.get(key, math.nan) for key in self._sent.get(rank, ())]
            for key in self._received.get(rank, ()):
                own.extend(messages.received.get(key, NEVER))
            size = 1 + 2 * len(self._sent.get(rank, ())) + len(self._received.get(rank, ()))
            arriving[rank] = torch.empty(size, dtype=torch.float64)
            works.append(dist.isend(torch.tensor([met, *own], dtype=torch.float64), rank, group=self._group))
            works.append(dist.irecv(arriving[rank], rank, group=self._group))
        for work in works:
            assert work is not None
            work.wait()
        return sum(self._waited_for(rank, messages, met, answer.tolist()) for rank, answer in arriving.items())

    def _waited_for(self, rank: int, messages: Messages, met: float, answer: list[float]) -> float:
        their_meeting, *times = answer
        self._offsets[rank].add(met, their_meeting)
        ahead = self._offsets[rank].seconds
        incoming, outgoing = self._received.get(rank, []), self._sent.get(rank, [])
        seconds = 0.0
        for key, sent in zip(incoming, times, strict=False):
            blocked = messages.received.get(key)
            if blocked is not None and not math.isnan(sent):
                seconds += waited_to_receive(blocked, sent - ahead)
        received = times[len(incoming) :]
        for key, start, end in zip(outgoing, received[::2], received[1::2], strict=True):
            blocked = messages.awaited.get(key)
            if blocked is not None and not math.isnan(start):
                seconds += waited_to_send(blocked, Interval(start - ahead, end - ahead))
        return seconds

    def to_rank_0(self, row: np.ndarray) -> np.ndarray | None:
        """Returns the rows of all ranks, `[ranks, numbers]`, on rank 0, and None on others."""
        if self._group is None:
            return row[None]
        own = torch.from_numpy(row)
        rows = [torch.empty_like(own) for _ in self.hosts] if self._owner.rank == 0 else None
        dist.gather(own, rows, dst=0, group=self._group)
        return None if rows is None else torch.stack(rows).numpy()

    def clocks(self, met: Sequence[float]) -> list[float]:
        """Returns by how much the clock of each rank is ahead of this one's, with when each left its last meeting."""
        for offset, theirs in zip(self._offsets, met, strict=True):
            offset.add(met[self._owner.rank], theirs)
        return [offset.seconds for offset in self._offsets]
