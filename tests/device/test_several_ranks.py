"""Training steps of several ranks to their end, in the order and with the blocking of NCCL's streams.

Would catch: messages or collectives that ranks begin in different orders, a wait that stands in the way of what it
waits for, groups that are not made alike on all ranks. Kernels do nothing, so values are for tests/ranks to compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import resolve_layout
from megalite.config.rules.pipeline import SPLITS_BACKWARD
from megalite.engine.pipeline.pipeline_runtime import ProgramRun
from megalite.planner.cost.memory import communicators
from megalite.planner.workload import TrainingWorkload
from megalite.schedules.passes import PassKind
from megalite.schedules.program import Program, Send
from megalite.schedules.tables import Schedule
from tests.device.counts import change_setting, counts_now
from tests.device.test_stand_in import said_by_failing, say_into
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.odd_sizes import DEEP
from tests.helpers.rank_pool import run_fresh_ranks

LAYOUTS = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2), (2, 2, 2), (1, 2, 2), (1, 1, 4)]
LAYOUTS += [(5, 1, 1), (3, 2, 1), (7, 1, 1), (8, 1, 1), (1, 1, 3), (1, 2, 4)]
"""Sizes of the axes pipeline, tensor and data."""


def _cases(*, all_stages: bool) -> Iterator[Case]:
    """Every schedule with every layout, and with one ZeRO stage in turn or with all."""
    pairs = [(layout, each) for layout in LAYOUTS for each in Schedule if layout[0] > 1 or each is Schedule.ONE_F_ONE_B]
    for number, ((pp, tp, dp), schedule) in enumerate(pairs):
        known = (1, 2) if schedule.value in SPLITS_BACKWARD else (1, 2, 3)  # the rest is refused
        stages = known if all_stages else (known[number % len(known)],)
        yield from (_case(pp, tp, dp, zero, schedule) for zero in stages)


def _case(pp: int, tp: int, dp: int, zero: int, schedule: Schedule) -> Case:
    return Case(
        tp=tp,
        pp=pp,
        dp=dp,
        zero=zero,
        schedule=schedule.value,
        accumulation=2 * pp,
        micro_batch=1,
        sequence=192,  # activations large enough to be offloaded
        steps=2,
        dtype="bf16",
        compile="none",
        sequence_parallel=tp > 1,
        model=DEEP | {"num_hidden_layers": max(9, 2 * pp)},
        offload={"activations": "cpu"} if (pp + tp) % 2 else {},
    )


def _groups(case: Case) -> int:
    """The kinds of groups that the planner counts, but that of all ranks, which is there, and DeepSpeed's of one."""
    config = case.config()
    job = TrainingWorkload.of(config, resolve_layout(config, case.world_size, "cuda"))
    return communicators(job) - 1 + (case.dp == 1)


def _train_each(rank: int, cases: list[Case]) -> None:
    """With one connection: whatever ends in this order ends in those of more connections, which leave orders free."""
    change_setting("CUDA_DEVICE_MAX_CONNECTIONS", 1)
    change_setting("STAND_IN_HAZARDS", 2)
    for case in cases:
        try:
            before = counts_now()
            engine = engine_of(case)
            made, groups = counts_now() - before, _groups(case)
            assert made.splits == groups >= made.communicators, (made, groups)
            for batch in global_batches(case):
                engine.train_step(micro_batches_of(engine, case, batch), 1e-3)
            torch.cuda.synchronize()
        except Exception as error:
            raise AssertionError(str(case)) from error
        dist.barrier()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("all_stages", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_steps_end(world_size: int, all_stages: bool) -> None:
    cases = [case for case in _cases(all_stages=all_stages) if case.world_size == world_size]
    run_fresh_ranks(_train_each, world_size, cases, timeout_s=3000 if all_stages else 500)


def _train_with_a_late_send(rank: int, folder: Path, case: Case) -> None:
    """The second stage sends its first outputs behind its first backward, which needs what comes of them."""
    run = ProgramRun.run

    def run_late(self: ProgramRun, program: Program) -> list[Tensor]:
        kinds = [getattr(action, "kind", None) for action in program]
        begin, end = program[: kinds.index(PassKind.BACKWARD) + 1], program[kinds.index(PassKind.BACKWARD) + 1 :]
        late = [action for action in begin if isinstance(action, Send)]
        return run(self, [*(action for action in begin if action not in late), *late, *end])

    change_setting("STAND_IN_HAZARDS", 2)
    engine = engine_of(case)
    dist.barrier()
    say_into(folder, rank)
    with patch.object(ProgramRun, "run", run_late if rank == 1 else run):
        (batch, *_) = global_batches(case)
        engine.train_step(micro_batches_of(engine, case, batch), 1e-3)
    torch.cuda.synchronize()


def test_a_wrong_order_hangs_and_each_rank_says_what_it_waits_for(tmp_path: Path) -> None:
    said = said_by_failing(tmp_path, _train_with_a_late_send, 4, _case(4, 1, 1, 1, Schedule.ONE_F_ONE_B))
    assert "this step hangs" in said, said
    assert re.search(r"rank [12]: stream \d+ waits in receive of \d+ bfloat16, number \d+, for rank [12]", said), said
