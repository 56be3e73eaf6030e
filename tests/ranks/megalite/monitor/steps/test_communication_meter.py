"""Collectives of real ranks: what is begun asynchronously holds a rank up where it waits."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megalite.monitor.steps.communication_meter import CommunicationMeter
from megalite.tracing.tape import Collective, Tape
from tests.helpers.engine_cases import Case, engine_of
from tests.helpers.rank_pool import run_ranks

LATE_S = 1.0


def _gathered(rank: int) -> tuple[list[Collective], bool]:
    """Rank 1 is late in the first collective; the second one is never waited for, and the third not metered."""
    engine = engine_of(Case(dp=2))
    group, wait = engine.data_parallel_group(), dist.Work.wait
    engine.activity.tape = tape = Tape()
    own, all_of_them = torch.full((5,), float(rank)), [torch.empty(5), torch.empty(5)]
    with CommunicationMeter(engine):
        if rank == 1:
            time.sleep(LATE_S)
        work = dist.all_gather(all_of_them, own, group=group, async_op=True)
        assert work is not None
        work.wait()
        assert work.wait(), "waiting again does no harm"
        unheeded = dist.all_reduce(own, group=group, async_op=True)
        engine.activity.tape = None
        dist.all_reduce(own, group=group)
        del unheeded
    engine.activity.tape = tape
    engine.activity.record_op(engine.activity.now.operation)
    assert [gathered.tolist() for gathered in all_of_them] == [[0.0] * 5, [1.0] * 5]
    return tape.take().collectives, dist.Work.wait is wait


def test_the_wait_for_an_asynchronous_collective_is_its_own_and_counts_no_second_call() -> None:
    """Else a rank's own work would hold its waiting for a slow one, as ZeRO-3 gathers weights, and hide who is slow."""
    answers = run_ranks(_gathered, 2)
    for collectives, is_put_back in answers:
        assert [(one.axis, one.operation, one.size, one.is_wait) for one in collectives] == [
            ("data", "all_gather", 40, False),
            ("data", "all_gather", 0, True),
            ("data", "all_reduce", 20, False),
        ]
        assert is_put_back
    began, waited, _ = answers[0][0]
    assert waited.seconds > LATE_S / 3 > began.seconds, "rank 0 is held up where it waits"
