"""A pool's ranks live on, and no task notices what ran before it."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups

import megalite.engine.stages as engine_module
from megalite.engine.deepspeed.internals import process_groups, timeout_of
from megalite.parallel.linear import RowParallelLinear
from tests.helpers import rank_pool
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import RankFailure, close_pools, renewals, run_fresh_ranks, run_ranks

LIMIT_S = 20.0


@pytest.fixture(autouse=True, scope="module")
def _ranks_of_this_module_only() -> Iterator[None]:
    close_pools()
    yield
    close_pools()


def _pid(rank: int) -> int:
    return os.getpid()


def _sum(rank: int) -> float:
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return float(total)


def test_ranks_live_on() -> None:
    first = run_ranks(_pid, 2)
    assert run_ranks(_pid, 2) == first
    assert len({*first, os.getpid()}) == 3
    assert run_ranks(_sum, 2) == [3.0, 3.0]
    assert set(run_fresh_ranks(_pid, 2)).isdisjoint(first)


def test_pools_that_were_not_used_for_longest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "MOST_RANKS", 4)
    (one,), (two, _) = run_ranks(_pid, 1), run_ranks(_pid, 2)
    assert run_ranks(_pid, 1) == [one]
    three = run_ranks(_pid, 3)
    assert psutil.pid_exists(one) and not psutil.pid_exists(two)
    run_ranks(_pid, 4)
    assert not any(psutil.pid_exists(pid) for pid in (one, *three))


def _raises(rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"planted on rank {rank}")
    dist.barrier()


def _hangs(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    threading.Event().wait()


def _dies(rank: int) -> None:
    if rank == 1:
        os._exit(9)
    dist.barrier()


def _cannot_be_told(rank: int) -> Any:
    return threading.Lock()


@pytest.mark.parametrize(
    ("task", "arguments", "timeout_s", "sentence", "line"),
    [
        (_raises, (1,), LIMIT_S, r"rank 1: ValueError: planted on rank 1", "in _raises\n"),
        (_hangs, (), 1.5, r"no answer from ranks \[0, 1\] within|Timed out waiting 1500ms", ""),
        (_dies, (), LIMIT_S, r"rank 1 died|rank 0: .*(closed|reset)", ""),
        (_cannot_be_told, (), LIMIT_S, r"TypeError: cannot pickle", "in answer\n"),
    ],
    ids=["raises", "hangs", "dies", "returns a lock"],
)
def test_a_failure_ends_its_pool_and_no_later_task(
    task: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float, sentence: str, line: str
) -> None:
    before = run_ranks(_pid, 2)
    began = time.monotonic()
    with pytest.raises(RankFailure, match=sentence) as failure:
        run_ranks(task, 2, *arguments, timeout_s=timeout_s)
    assert time.monotonic() - began < timeout_s + 5
    assert line in failure.value.rank_traceback
    assert failure.value.__notes__ == [failure.value.rank_traceback]
    assert not any(psutil.pid_exists(pid) for pid in before), "ranks that wait for the one that failed"
    assert run_ranks(_sum, 2) == [3.0, 3.0]
    assert set(run_ranks(_pid, 2)).isdisjoint(before)


def test_a_task_that_cannot_be_sent_ends_nothing() -> None:
    before = run_ranks(_pid, 2)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_ranks(_raises, 2, threading.Lock())
    assert run_ranks(_pid, 2) == before


def _timeout(rank: int) -> float:
    return timeout_of(dist.group.WORLD).total_seconds()


def test_collectives_end_with_the_task() -> None:
    assert [run_ranks(_timeout, 2, timeout_s=seconds) for seconds in (41.0, 42.0)] == [[41.0] * 2, [42.0] * 2]


def _where(rank: int) -> Path:
    return Path.cwd()


def test_a_task_runs_where_the_test_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(_where, 2) == [tmp_path] * 2
    monkeypatch.undo()
    assert run_ranks(_where, 2) == [Path.cwd()] * 2


ROOT = logging.getLogger()


def _state(rank: int) -> dict[str, Any]:
    """What tasks may find changed, drawn random numbers among it; all of it comparable."""
    return {
        "environment": dict(os.environ),
        "dtype": (torch.get_default_dtype(), torch.zeros(1).dtype),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
        "signals": str(signal.getsignal(signal.SIGTERM)),
        "logging": (ROOT.level, len(ROOT.handlers), len(logging.getLogger("DeepSpeed").filters)),
        "groups": (len(process_groups()), groups._WORLD_GROUP, groups.mpu),
        "patched": (
            engine_module.head_loss.__name__,
            RowParallelLinear.forward.__name__,
            hasattr(engine_module, "new"),
        ),
        "contents": sorted(groups._EXPERT_PARALLEL_GROUP),
    }


def _changes(rank: int) -> None:
    os.environ |= {"RANK": "71", "SOMETHING_NEW": "1"}
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ROOT.setLevel(logging.DEBUG)
    ROOT.addHandler(logging.NullHandler())
    logging.getLogger("DeepSpeed").addFilter(lambda record: False)
    groups._WORLD_GROUP, groups.mpu = dist.new_group(), object()
    groups._EXPERT_PARALLEL_GROUP["planted"] = dist.new_group()
    engine_module.head_loss = lambda *_: None
    engine_module.new = 1  # type: ignore[attr-defined]
    RowParallelLinear.forward = lambda self, x: x  # type: ignore[method-assign]


def test_no_task_sees_what_another_has_changed() -> None:
    close_pools()
    before, pids = run_ranks(_state, 2), run_ranks(_pid, 2)
    assert before[0]["patched"] == ("head_loss", "forward", False)
    run_ranks(_changes, 2)
    after = run_ranks(_state, 2)
    assert run_ranks(_pid, 2) == pids, "else they are the same for another reason"
    for here, there in zip(before, after, strict=True):
        assert here == there
    for mine, other in zip(after, run_fresh_ranks(_state, 2), strict=True):
        names = ("environment", "random")  # another port; and python's and numpy's numbers, which no fork repeats
        assert {k: v for k, v in mine.items() if k not in names} == {k: v for k, v in other.items() if k not in names}
        assert mine["random"][2] == other["random"][2]


def _trains(rank: int, case: Case) -> tuple[list[float], int, int, int]:
    groups_before = len(process_groups())
    engine = engine_of(case)
    losses = [
        float(engine.train_step(micro_batches_of(engine, case, batch), 1e-3).loss) for batch in global_batches(case)
    ]
    threads, files = (len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd"))
    return losses, groups_before, threads, files


def test_an_engine_computes_the_same_after_others_and_leaves_nothing() -> None:
    close_pools()
    case = Case(tp=2, zero=3, dtype="bf16")
    fresh = run_fresh_ranks(_trains, 2, case)
    others = Case(pp=2, zero=3), Case(dp=2, zero=2)
    runs = [run_ranks(_trains, 2, each) for each in [case, others[0], case, others[1], case, case, case]]
    for at in (0, 2, 4, 5, 6):
        assert [losses for losses, *_ in runs[at]] == [losses for losses, *_ in fresh]
    for rank in (0, 1):
        assert {run[rank][1] for run in runs} == {1}, "the world alone"
        _, _, threads, files = zip(*(run[rank] for run in runs), strict=True)
        assert len({threads[at] for at in (2, 4, 5, 6)}) == 1, f"threads of groups pile up: {threads}"
        assert len({files[at] for at in (2, 4, 5, 6)}) == 1, f"sockets of groups pile up: {files}"


def _leaves_a_thread(rank: int) -> None:
    threading.Thread(target=threading.Event().wait, name="left behind", daemon=True).start()


def _grows(rank: int, kept: str) -> None:
    setattr(dist, kept, torch.ones(130_000_000))  # a module whose names nobody puts back


@pytest.mark.parametrize(
    ("task", "arguments", "reason"), [(_leaves_a_thread, (), "left behind"), (_grows, ("kept",), "MB more memory")]
)
def test_ranks_that_cannot_be_put_back_are_replaced_quietly(
    task: Callable[..., Any], arguments: tuple[Any, ...], reason: str
) -> None:
    before = run_ranks(_pid, 1)
    run_ranks(task, 1, *arguments)
    assert run_ranks(_pid, 1) != before
    assert reason in renewals()[-1]
