"""What real ranks say about their steps: it adds up on each of them, changes no number, and names who is slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.saver import Saved
from megalite.config import Config
from megalite.monitor.observer import Observer
from megalite.monitor.steps import slow_ranks
from megalite.monitor.steps.breakdown import COLUMN, StepBreakdown
from megalite.monitor.steps.gathering import Gathering
from megalite.monitor.steps.parts import PARTS
from megalite.monitor.steps.slow_ranks import SlowRank
from megalite.monitor.steps.timeline import read_step, steps_of
from megalite.resilience.guards import Guard
from megalite.resilience.stop_requests import StopRequests
from megalite.training.checkpoints import Checkpoints
from megalite.training.loop import TrainerContext, train
from megalite.training.state import TrainState
from models.decoder import DecoderBlock
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks

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


class _Log(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.records: list[dict[str, Any]] = []
        self.breakdowns: list[StepBreakdown] = []
        self.slow: list[SlowRank] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.records.append(record)

    def on_breakdown(self, breakdown: StepBreakdown) -> None:
        self.breakdowns.append(breakdown)

    def on_slow_rank(self, change: SlowRank) -> None:
        self.slow.append(change)

    def log_notice(self, sentence: str) -> None:
        """Sentences of saves are looked at elsewhere."""

    def event(self, name: str, **facts: Any) -> None:
        """And events."""

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        assert saved.failure is None, saved.failure


def _config(case: Case, run_dir: Path, monitor: dict[str, Any]) -> Config:
    values = case.config().model_dump(mode="json")
    values["run_dir"] = str(run_dir)
    values["monitor"] = monitor
    values["checkpoint"]["interval"] = 2
    values["training"] |= {"self_check_every": 2}
    values["training"]["evaluation"] |= {"interval": 2}
    return Config.model_validate(values)


def _train(case: Case, config: Config, log: _Log) -> None:
    engine = engine_of(case)
    first, *_ = (micro_batches_of(engine, case, batch) for batch in global_batches(case))
    context = TrainerContext(
        batches=lambda state: (micro_batches_of(engine, case, batch) for batch in global_batches(case)),
        evaluation=first,
        evaluation_count=case.accumulation,
        guard=Guard(engine, config.guards),
        checkpoints=Checkpoints(
            engine,
            config.checkpoint,
            config.run_dir,
            log,
            lambda state: Manifest(
                step=state.step, config={}, tokenizer=None, state=state.model_dump(), tensors={}, files={}
            ),
        ),
        requests=StopRequests(None, 0.0),
        observer=log,
    )
    train(engine, config, TrainState(), context)


def _recorded(rank: int, case: Case, run_dir: Path) -> tuple[list[np.ndarray], _Log, list[float]]:
    """The rows that this rank has sent, what its observer was told, and its losses without a record."""
    rows: list[np.ndarray] = []
    to_rank_0 = Gathering.to_rank_0

    def kept(self: Gathering, row: np.ndarray) -> np.ndarray | None:
        rows.append(row.copy())
        return to_rank_0(self, row)

    Gathering.to_rank_0 = kept  # type: ignore[method-assign]
    log = _Log()
    _train(case, _config(case, run_dir, {"timeline": {"steps": [3]}}), log)
    engine = engine_of(case)
    bare = [
        float(engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate).loss)
        for batch in global_batches(case)[:1]
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
        assert (seconds["gradient_sync"] > 0) == (case.dp > 1 or "tie_word_embeddings" in case.model)
    _, log, bare = answers[0]
    assert log.losses[:1] == bare, "the record changes no bit"
    assert [record["step"] for record in log.records] == [1, 2, 3, 4, 5]
    for record in log.records:
        assert sum(record["parts_s"].values()) == pytest.approx(record["wall_s"], abs=1e-6)
        assert record["wall_s"] >= record["step_time_s"] * 0.99 and 0 <= record["communication_share"] <= 1
    idle = [stage.idle_ratio for stage in log.breakdowns[-1].stages]
    assert len(idle) == case.pp and all((ratio is None) == (case.pp == 1) for ratio in idle)
    assert steps_of(tmp_path) == [3, 5] and sorted(read_step(tmp_path, 3)) == list(range(case.world_size))


def _with_a_slow_rank(rank: int, run_dir: Path) -> tuple[list[dict[str, Any]], list[SlowRank]]:
    """Rank 1 takes five times as long in its blocks. There is no room for timelines."""
    case = Case(dp=2, steps=18)
    slow_ranks.WINDOW = 3
    (run_dir / "timeline").touch()
    if rank == 1:
        forward = DecoderBlock.forward

        def late(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = forward(self, *args, **kwargs)
            time.sleep(4 * (time.monotonic() - began) + 0.02)
            return result

        DecoderBlock.forward = late  # type: ignore[method-assign]
    log = _Log()
    _train(case, _config(case, run_dir, {"log_interval": 3}), log)
    return log.records, log.slow


def test_the_rank_that_all_others_wait_for_is_named_and_a_full_disk_costs_no_step(tmp_path: Path) -> None:
    (records, slow), (_, nothing) = run_ranks(_with_a_slow_rank, 2, tmp_path)
    assert [(change.rank, change.part, change.is_over) for change in slow] == [(1, "forward", False)]
    assert not nothing, "rank 0 alone speaks"
    assert [record["step"] for record in records if "parts_s" in record] == [3, 6, 9, 12, 15, 18]
    assert len(records) == 18
