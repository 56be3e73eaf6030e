"""Every process group waits as long as the job's own, whoever made it: a rank that is gone is not waited for longer in
one collective than in another."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint.saver import LONGEST_SAVE, Saver
from megalite.engine.deepspeed import internals as seams
from megalite.engine.deepspeed.process_groups import group_timeout, share_timeout
from megalite.parallel.mesh import Mesh
from megalite.resilience.stop_requests import StopRequests
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks

TIMEOUT_S = 290.0  # no default of anybody's

Groups = list[tuple[tuple[int, ...], float]]


def _groups(rank: int, case: Case, folder: Path) -> Groups:
    engine = engine_of(case)
    StopRequests(None, 0.0)
    Saver(engine, folder, background=False)
    for batch in global_batches(case):
        engine.train_step(micro_batches_of(engine, case, batch), 1e-3)
    return [
        (tuple(dist.get_process_group_ranks(group)), seams.timeout_of(group).total_seconds())
        for group in seams.process_groups()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, pp=2, dp=2, steps=1, model={"tie_word_embeddings": True}),
        Case(tp=2, dp=2, zero=3, steps=1),
        Case(dp=4, zero=3, steps=1, zero_options={"zero_hpz_partition_size": 2}),
    ],
    ids=str,
)
def test_all_groups_have_the_timeout_of_the_job(case: Case, tmp_path: Path) -> None:
    mesh = Mesh(case.tp, case.pp, case.dp)
    for rank, groups in enumerate(run_fresh_ranks(_groups, case.world_size, case, tmp_path, timeout_s=TIMEOUT_S)):
        others = [seconds for _, seconds in groups if seconds != TIMEOUT_S]
        assert others == [LONGEST_SAVE.total_seconds()], "files are written in one of them: storage may be slow"
        at = mesh.coordinate(rank)
        tensor = tuple(mesh.rank(at.pipeline_rank, at.data_rank, each) for each in range(case.tp))
        pipeline = tuple(mesh.rank(each, at.data_rank, at.tensor_rank) for each in range(case.pp))
        data = tuple(mesh.rank(at.pipeline_rank, each, at.tensor_rank) for each in range(case.dp))
        seen = [ranks for ranks, _ in groups]
        needed = {ranks for ranks in (tensor, pipeline, data, tuple(range(mesh.world_size))) if len(ranks) > 1}
        assert needed <= set(seen) and min(map(len, seen)) > 1, seen


def _waits_for_nobody(rank: int) -> tuple[float, str]:
    alone = dist.new_group([0, 1])
    before = seams.timeout_of(alone)
    assert before > timedelta(minutes=5), "torch's default"
    seams.set_timeout(dist.group.WORLD, timedelta(seconds=2))
    share_timeout()
    assert group_timeout() == timedelta(seconds=2)
    began, error = time.monotonic(), ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=alone)
        except RuntimeError as caught:
            error = str(caught)
    else:
        time.sleep(4)
    return time.monotonic() - began, error


def test_a_collective_of_a_group_ends_when_its_time_is_over() -> None:
    (seconds, error), _ = run_fresh_ranks(_waits_for_nobody, 2)
    assert "Timed out" in error and 1.9 < seconds < 3.5, (seconds, error)
