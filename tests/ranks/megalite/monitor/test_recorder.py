"""What real ranks say about their steps: it adds up on each of them, changes no number, and names who is slow."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.engine.engine import Engine
from megalite.monitor.steps import recorder, slow_ranks
from megalite.monitor.steps.breakdown import COLUMN
from megalite.monitor.steps.gathering import Gathering
from megalite.monitor.steps.parts import PARTS
from megalite.monitor.steps.slow_ranks import SlowRank
from megalite.monitor.steps.timeline import step_folder, steps_of
from megalite.tracing import activity, tape
from models.decoder import DecoderBlock
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.kept_timelines import read_step
from tests.helpers.planting import Plant, planted
from tests.helpers.rank_pool import run_fresh_ranks, run_ranks
from tests.helpers.recorded_run import KeptLog, config_of, train_case

SIX_BLOCKS = {"num_hidden_layers": 6}
TIED = {"tie_word_embeddings": True}
CASES = [
    Case(),
    Case(tp=2, sequence_parallel=True, sequence=34),
    Case(dp=2, accumulation=2, bucket=500),
    Case(dp=2, zero=2, accumulation=2),
    Case(dp=2, zero=3, dtype="bf16"),
    Case(pp=2, accumulation=3, model=TIED),
    Case(pp=2, schedule="interleaved", accumulation=4, model=SIX_BLOCKS),
    Case(pp=2, dp=2, zero=2, schedule="zb-v", accumulation=4, model=SIX_BLOCKS | TIED),
]


def _kept_rows() -> list[np.ndarray]:
    """A list of the rows that this rank will have sent."""
    rows: list[np.ndarray] = []
    to_rank_0 = Gathering.to_rank_0

    def kept(self: Gathering, row: np.ndarray) -> np.ndarray | None:
        rows.append(row.copy())
        return to_rank_0(self, row)

    Gathering.to_rank_0 = kept  # type: ignore[method-assign]
    return rows


def _recorded(rank: int, case: Case, run_dir: Path) -> tuple[list[np.ndarray], KeptLog, list[float]]:
    """The rows that this rank has sent, what its observer was told, and its losses without a record.

    There is a timeline of a step that an earlier session, which had more ranks, has made and not saved.
    """
    rows, log = _kept_rows(), KeptLog()
    if rank == 0:
        step_folder(run_dir, 4).mkdir(parents=True)
    train_case(case, config_of(case, run_dir, {"timeline": {"steps": [3]}}), log)
    engine = engine_of(case)
    bare = [
        float(engine.train_step(micro_batches_of(engine, case, batch), record["learning_rate"]).loss)
        for batch, record in zip(global_batches(case), log.records, strict=True)
    ]
    return rows, log, bare


@pytest.mark.parametrize("case", [Case(**{**vars(case), "steps": 5}) for case in CASES], ids=str)
def test_parts_add_up_to_the_wall_time_of_each_rank(case: Case, tmp_path: Path) -> None:
    """With evaluations, saves and self-checks among the steps."""
    answers = run_ranks(_recorded, case.world_size, case, tmp_path)
    for rank, (rows, _, _) in enumerate(answers):
        assert len(rows) == 5, f"rank {rank}: a row for each step"
        for row in rows:
            parts = row[COLUMN["data"] : COLUMN["other"] + 1]
            assert parts.sum() == pytest.approx(row[COLUMN["wall_s"]], abs=1e-6), f"rank {rank}"
            assert parts.min() > -1e-9
            assert row[COLUMN["forward"]] > 0 and row[COLUMN["backward"]] > 0, f"rank {rank}"
        seconds = dict(zip(PARTS, np.sum(rows, axis=0)[COLUMN["data"] : COLUMN["other"] + 1], strict=True))
        for part in ("evaluation", "checkpoint", "self_check", "optimizer", "loss", "logging"):
            assert seconds[part] > 0, f"rank {rank}: nothing in {part}"
        assert (seconds["tensor_collectives"] > 0) == (case.tp > 1)
        in_messages = seconds["pipeline_wait"] + seconds["pipeline_transfer"]
        assert (in_messages > 0) == (case.pp > 1)
        sums = np.sum(rows, axis=0)
        told = sums[COLUMN["pipeline send seconds"]] + sums[COLUMN["pipeline receive seconds"]]
        assert told == pytest.approx(seconds["pipeline_transfer"], rel=0.05, abs=1e-4), "no transfer is told twice"
        is_tied = "tie_word_embeddings" in case.model
        assert (seconds["gradient_sync"] > 0) == (case.dp > 1 or is_tied or case.sequence_parallel)
        assert (seconds["weights_sync"] > 0) == (case.dp > 1 or is_tied)
    rows, log, bare = answers[0]
    assert log.losses == bare, "the record changes no bit"
    assert [record["step"] for record in log.records] == [1, 2, 3, 4, 5]
    for record, row in zip(log.records, rows, strict=True):
        assert sum(record["parts_s"].values()) == pytest.approx(record["wall_s"], abs=1e-6)
        assert row[COLUMN["wall_s"]] >= record["step_time_s"] and 0 <= record["communication_share"] <= 1
    idle = [stage.idle_ratio for stage in log.breakdowns[-1].stages]
    assert len(idle) == case.pp and all((ratio is None) == (case.pp == 1) for ratio in idle)
    assert steps_of(tmp_path) == [3, 5] and sorted(read_step(tmp_path, 3)) == list(range(case.world_size))


def _with_a_bad_step(rank: int, case: Case, run_dir: Path, policy: str) -> tuple[list[np.ndarray], KeptLog]:
    """The third step is not finite, once."""
    rows, log, bad = _kept_rows(), KeptLog(), Plant("output", "model.layers.3 mlp.down_proj", 1, 1, lasts=False)

    def batches_of(engine: Engine, batches: list[Any]) -> Iterator[Any]:
        yield from batches[:2]
        with planted(engine, case, rank, bad) if len(log.records) == 2 else nullcontext():
            yield batches[2]
        yield from batches[3:]

    timelines = {"every": 1, "keep": 2, "ranks": [1]}
    train_case(case, config_of(case, run_dir, {"timeline": timelines}, {"not_finite": policy}), log, batches_of)
    return rows, log


@pytest.mark.parametrize(("policy", "steps"), [("skip", [1, 2, 3, 4, 5]), ("rollback", [1, 2, 3, 3, 4, 5])])
def test_steps_that_are_skipped_or_done_again_add_up_too(policy: str, steps: list[int], tmp_path: Path) -> None:
    case = Case(dp=2, accumulation=2, steps=5)
    for rows, log in run_ranks(_with_a_bad_step, 2, case, tmp_path, policy):
        assert [record["step"] for record in log.records] == steps
        assert [number for number, record in enumerate(log.records) if record["skipped"]] == [2]
        for row in rows:
            assert row[COLUMN["data"] : COLUMN["other"] + 1].sum() == pytest.approx(row[COLUMN["wall_s"]], abs=1e-6)
        met = [row[COLUMN["met"]] for row in rows]
        assert met[0] == 0 and met == sorted(set(met)), "each window begins with a meeting of its own"
        assert len(rows) == len(steps)
        if policy == "rollback":
            assert rows[3][COLUMN["checkpoint"]] > 0, "the checkpoint that was loaded"
    assert steps_of(tmp_path) == [4, 5], "the last two"
    assert [sorted(read_step(tmp_path, step)) for step in (4, 5)] == [[1], [1]]


def _rarely(rank: int, run_dir: Path) -> tuple[list[np.ndarray], list[int]]:
    rows, log, case = _kept_rows(), KeptLog(), Case(dp=2, steps=6)
    recorder.ALL_UP_TO, recorder.EVERY_S = 2, 1e9  # behind the second step at the end alone
    train_case(case, config_of(case, run_dir, {}), log)
    return rows, [record["step"] for record in log.records if "parts_s" in record]


def test_many_short_steps_are_told_together_and_none_is_left_out(tmp_path: Path) -> None:
    """To gather each took longer than all else behind a step of a few milliseconds."""
    answers = run_fresh_ranks(_rarely, 2, tmp_path)
    assert answers[0][1] == [1, 2, 6]
    for rows, _ in answers:
        assert [row[COLUMN["steps"]] for row in rows] == [1, 1, 4]
        for row in rows:
            assert row[COLUMN["data"] : COLUMN["other"] + 1].sum() == pytest.approx(row[COLUMN["wall_s"]], abs=1e-6)


def _slower(rank: int, run_dir: Path) -> tuple[list[dict[str, Any]], list[tuple[int, SlowRank]], list[np.ndarray]]:
    """Rank 1 works for 45 % longer in each block. Time is that of its own processor: others on this machine do not
    count. There is no room for timelines."""
    case = Case(dp=2, steps=48)
    slow_ranks.WINDOW, rows = 12, _kept_rows()
    activity.monotonic = tape.monotonic = time.process_time  # type: ignore[attr-defined]
    (run_dir / "timeline").touch()
    if rank == 1:
        block = DecoderBlock._block

        def work_on(began: float) -> None:
            until = time.process_time() + 0.45 * (time.process_time() - began)
            while time.process_time() < until:
                pass

        def slow(self: Any, hidden: torch.Tensor, *others: Any) -> Any:
            began, backward_began = time.process_time(), [0.0]
            result = block(self, hidden, *others)
            if torch.is_grad_enabled():
                result.register_hook(lambda gradient: backward_began.__setitem__(0, time.process_time()))
                hidden.register_hook(lambda gradient: work_on(backward_began[0]))
            work_on(began)
            return result

        DecoderBlock._block = slow  # type: ignore[method-assign]
    log = KeptLog()
    said: list[tuple[int, SlowRank]] = []
    log.on_slow_rank = lambda change: said.append((len(log.records) + 1, change))  # type: ignore[method-assign]
    train_case(case, config_of(case, run_dir, {"log_interval": 3}), log)
    return log.records, said, rows


def test_a_rank_that_is_slower_by_a_third_is_named_in_four_windows_and_a_full_disk_costs_no_step(
    tmp_path: Path,
) -> None:
    """1 / 1.45 is a speed of 0.69."""
    (records, slow, rows), (_, nothing, _) = run_ranks(_slower, 2, tmp_path)
    assert [change.rank for _, change in slow] == [1] and slow[0][0] <= 48
    assert 0.5 < slow[0][1].relative_speed < 0.85
    assert not nothing, "rank 0 alone speaks"
    assert [record["step"] for record in records if "parts_s" in record] == list(range(3, 49, 3))
    assert len(records) == 48
    for row in rows:  # of three steps together
        reduced_s, sync_s = row[COLUMN["data reduce_scatter seconds"]], row[COLUMN["gradient_sync"]]
        assert 0.5 * sync_s < reduced_s <= sync_s + 1e-9, "not of the last step alone"


def _stopped_now_and_then(rank: int, run_dir: Path, steps: int) -> tuple[list[tuple[int, SlowRank]], int]:
    """Rank 1 is stopped for 30 of every 100 ms, as a processor that is too hot stops."""
    slow_ranks.WINDOW = 50
    log, said, case = KeptLog(), [], Case(dp=2, steps=steps, accumulation=4)
    log.on_slow_rank = lambda change: said.append((len(log.records) + 1, change))  # type: ignore[method-assign]
    throttle = None
    if rank == 1:
        program = (
            "import os, signal, sys, time\n"
            "rank = int(sys.argv[1])\n"
            "while os.getppid() == rank:\n"
            "    for number, seconds in ((signal.SIGSTOP, 0.03), (signal.SIGCONT, 0.07)):\n"
            "        os.kill(rank, number)\n"
            "        time.sleep(seconds)\n"
        )
        throttle = subprocess.Popen([sys.executable, "-c", program, str(os.getpid())])
    try:
        train_case(case, config_of(case, run_dir, {"log_interval": 10, "timeline": {"ranks": []}}), log)
    finally:
        if throttle is not None:
            throttle.kill()
            throttle.wait()
    return said, len(log.records)


@pytest.mark.exhaustive  # a thousand forward and backward passes, on a machine that must be calm
def test_a_rank_that_is_stopped_for_a_third_of_its_time_is_named_in_four_windows(tmp_path: Path) -> None:
    (said, records), _ = run_fresh_ranks(_stopped_now_and_then, 2, tmp_path, 200, timeout_s=300)
    assert records == 200 and [change.rank for _, change in said if not change.is_over] == [1]
    assert said[0][0] <= 200
