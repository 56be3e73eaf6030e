"""Losses by source in the records of a training loop: over restarts, rollbacks, skipped steps and late results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.reader import CheckpointReader
from megalite.config import Config
from megalite.engine.engine import Engine
from megalite.parallel.loss import IGNORED
from megalite.training.state import TrainState
from tests.helpers.engine_cases import Case, global_batches
from tests.helpers.planting import Plant, planted
from tests.helpers.rank_pool import run_ranks
from tests.helpers.recorded_run import KeptLog, train_case

STEPS, SAVED, BAD = 8, 4, 2  # entries come every third step, so the checkpoint lies between two of them
SPOILED = Plant("gradient", "model.layers.4.self_attn.qkv_proj.weight", 0, 1, lasts=False)
NAMES = [f"source_{place:02}" for place in range(3)]
COMMON = {"steps": STEPS, "sources": len(NAMES), "learning_rate": 1e-30, "global_batch": 12}  # weights stay
REPLICAS = Case(dp=2, accumulation=2, **COMMON)
STAGES = Case(pp=2, accumulation=4, **COMMON)


def _config(case: Case, run_dir: Path, policy: str) -> Config:
    values = case.config().model_dump(mode="json") | {"run_dir": str(run_dir), "guards": {"not_finite": policy}}
    values["checkpoint"]["interval"], values["monitor"]["log_interval"] = SAVED, 3
    return Config.model_validate(values)


def _train(
    rank: int,
    case: Case,
    run_dir: Path,
    start: Path | None = None,
    *,
    is_late: bool = False,
    policy: str = "skip",
    bad: int = BAD,
) -> list[dict[str, Any]]:
    """The records of a run with a bad step, from its beginning or from the state of a checkpoint."""
    log = KeptLog()
    state = TrainState() if start is None else TrainState.model_validate(CheckpointReader(start).manifest.state)

    def batches_of(engine: Engine, batches: list[Any]) -> Iterator[Any]:
        engine.runs_ahead = is_late
        for step, batch in enumerate(batches[state.step :], start=state.step + 1):
            with planted(engine, case, rank, SPOILED) if step == bad else nullcontext():
                yield [replace(each, sources=each.samples % case.sources) for each in batch]

    run_dir.mkdir(exist_ok=True)
    train_case(case, _config(case, run_dir, policy), log, batches_of, state)
    return log.records


def told(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(one["step"], one.get("source_losses"), one.get("source_targets")) for one in records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The records of a run that nobody has stopped, and its folder."""
    run_dir = tmp_path_factory.mktemp("whole")
    return run_ranks(_train, 2, REPLICAS, run_dir)[0], run_dir


def test_every_target_of_a_step_that_was_taken_is_told_once(whole: tuple[list[dict[str, Any]], Path]) -> None:
    records, _ = whole
    assert [one["step"] for one in records if one["skipped"]] == [BAD]
    assert [one["step"] for one in records if "source_losses" in one] == [3, 6, 8]
    valid = [int((batch.targets != IGNORED).sum()) for batch in global_batches(REPLICAS)]
    for steps in ((1, 3), (4, 5, 6), (7, 8)):
        record = records[steps[-1] - 1]
        losses, targets = record["source_losses"], record["source_targets"]
        assert sorted(losses) == sorted(targets) == NAMES
        assert sum(targets.values()) == sum(valid[step - 1] for step in steps)
        mean = sum(losses[name] * targets[name] for name in NAMES) / sum(targets.values())
        steps_mean = sum(records[step - 1]["loss"] * valid[step - 1] for step in steps) / sum(targets.values())
        assert mean == pytest.approx(steps_mean, rel=1e-6), "sums of fp32 in another order"


def test_results_that_are_read_late_tell_the_same(whole: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    late = run_ranks(partial(_train, is_late=True), 2, REPLICAS, tmp_path)[0]
    assert told(late) == told(whole[0])


@pytest.mark.parametrize("case", [REPLICAS, STAGES], ids=["the same layout", "another layout"])
def test_a_restart_goes_on_with_the_same_values(
    case: Case, whole: tuple[list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    """Step 4 is saved and told with step 6."""
    records, run_dir = whole
    found = run_ranks(_train, 2, case, tmp_path, run_dir / "step_00000004")[0]
    for (step, losses, targets), (its_step, its_losses, its_targets) in zip(
        told(found), told(records[4:]), strict=True
    ):
        assert (step, targets) == (its_step, its_targets)
        assert losses == (its_losses and pytest.approx(its_losses, rel=2e-6)), "fp32 sums in another order"


def test_what_a_rollback_undoes_is_not_told_again(tmp_path: Path) -> None:
    """From the sixth step, which is bad, back to the fourth, and on with the first batches."""
    records = run_ranks(partial(_train, policy="rollback", bad=6), 2, REPLICAS, tmp_path)[0]
    assert [one["step"] for one in records] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    valid = [int((batch.targets != IGNORED).sum()) for batch in global_batches(REPLICAS)]
    counts = [sum(one["source_targets"].values()) for one in records if "source_targets" in one]
    assert counts == [sum(valid[:3]), valid[3] + valid[4], valid[3] + valid[0] + valid[1], valid[2] + valid[3]]
