"""A rollback loads a checkpoint into the engine that went wrong: it goes on as one that started from that checkpoint.

Weights, moments and step counts of the steps after the checkpoint must all be gone, from every buffer.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.reader import CheckpointReader
from megalite.engine.engine import Engine
from megalite.engine.optimizers.build import moments_of
from megalite.engine.parameter_state import moment_names, optimizer_step_count, read_parameter
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.planting import Plant, planted
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save

# every optimizer of DeepSpeed's once
PAIRS = [
    Case(dp=2, zero=1, dtype="bf16", steps=7),
    Case(dp=2, zero=2, steps=7),
    Case(dp=2, zero=3, dtype="bf16", steps=7),
    Case(pp=2, dtype="bf16", accumulation=2, model={"tie_word_embeddings": True}, steps=7),
    Case(dp=2, optimizer="sgd", steps=7),
]
OTHER_PAIRS = [
    Case(tp=2, steps=7),
    Case(dp=2, zero=1, accumulation=2, steps=7),
    Case(dp=2, zero=2, dtype="bf16", steps=7),
    Case(dp=2, zero=3, steps=7),
    Case(pp=2, accumulation=2, model={"tie_word_embeddings": True}, steps=7),
]


def _steps(engine: Engine, case: Case, first: int, last: int) -> list[tuple[float, float]]:
    seen = []
    for batch in global_batches(case)[first:last]:
        result = engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
        seen.append((float(result.loss), float(result.grad_norm)))
    return seen


def _end(engine: Engine, numbers: list[tuple[float, float]]) -> dict[str, Any]:
    kept, optimizer = moment_names(engine), engine.config.optimizer.name
    state = {
        f"{name} {kind}": tensor.numpy().tobytes()
        for name, parameter in engine.parameters()
        for kind, tensor in read_parameter(parameter, moments_of(parameter, optimizer) if kept else ()).items()
    }
    return {"numbers": numbers, "count": optimizer_step_count(engine), "state": state}


def _roll_back(rank: int, cases: list[Case], root: Path, saved_at: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Saves after `saved_at` steps, takes two more, goes back to what was saved, and on behind them.

    Beside it, what a new engine does that began with other weights and loaded the same checkpoint.
    """
    seen = []
    for index, case in enumerate(cases):
        engine = engine_of(case)
        _steps(engine, case, 0, saved_at)
        assert save(engine, root / str(index), saved_at, background=True).failure is None
        _steps(engine, case, saved_at, saved_at + 2)
        ends = []
        for one in (engine, engine_of(dataclasses.replace(case, seed=case.seed + 1))):
            folder = root / str(index) / f"step_{saved_at:08d}"
            load_engine(one, CheckpointReader(folder), weights_only=False)
            ends.append(_end(one, _steps(one, case, saved_at + 2, saved_at + 5)))
            one.deepspeed.destroy()
        seen.append((ends[0], ends[1]))
    return seen


def _check(cases: list[Case], root: Path, saved_at: int) -> None:
    ranks = run_ranks(_roll_back, cases[0].world_size, cases, root, saved_at)
    for index, case in enumerate(cases):
        for rank, (mine, expected) in enumerate(answers[index] for answers in ranks):
            where = f"{case} rank {rank}"
            assert mine["numbers"] == expected["numbers"], f"{where}: losses or gradient norms"
            assert mine["count"] == expected["count"] in (0, saved_at + 3), f"{where}: the optimizer's step count"
            assert mine["state"].keys() == expected["state"].keys(), where
            differing = [name for name, value in mine["state"].items() if value != expected["state"][name]]
            assert not differing, f"{where}: {differing}"


@pytest.mark.parametrize(
    "cases", [PAIRS, pytest.param(OTHER_PAIRS, marks=pytest.mark.exhaustive)], ids=["each optimizer", "others"]
)
def test_a_rollback_goes_on_as_a_resume(cases: list[Case], tmp_path: Path) -> None:
    _check(cases, tmp_path, 2)


def test_a_rollback_to_before_the_first_step_forgets_the_moments(tmp_path: Path) -> None:
    """Such a checkpoint holds no moments: those that exist must go, or the first steps would be remembered."""
    _check([Case(dp=2, zero=2, steps=7), Case(dp=2, zero=3, steps=7), Case(pp=2, dtype="bf16", steps=7)], tmp_path, 0)


@pytest.mark.slow
def test_a_rollback_goes_on_as_a_resume_in_three_dimensions(tmp_path: Path) -> None:
    _check([Case(tp=2, pp=2, dp=2, accumulation=2, steps=7)], tmp_path, 2)


NONE_TAKEN = [
    Case(dp=2, steps=3),
    Case(dp=2, dtype="bf16", steps=3),
    Case(tp=2, optimizer="muon", steps=3),
    Case(dp=2, optimizer="muon", optimizer_options={"moments_dtype": "bf16"}, steps=3),
]


def _begin_with_a_skip(rank: int, cases: list[Case], root: Path) -> list[list[dict[str, Any]]]:
    """A first step that the device skips; then two more at once, after going back, and from the checkpoint."""
    seen = []
    bad = Plant("gradient", "model.layers.1.self_attn.qkv_proj.weight", 1, 1)
    for index, case in enumerate(cases):
        engine, folder = engine_of(case), root / str(index)
        with planted(engine, case, rank, bad):
            ((loss, norm),) = _steps(engine, case, 0, 1)
        assert math.isfinite(loss) and not math.isfinite(norm)
        assert moment_names(engine) and not optimizer_step_count(engine), "zero moments, of no step"
        assert save(engine, folder, 1).failure is None
        ends = [_end(engine, _steps(engine, case, 1, 3))]
        for one in (engine, engine_of(dataclasses.replace(case, seed=case.seed + 1))):
            load_engine(one, CheckpointReader(folder / "step_00000001"), weights_only=False)
            ends.append(_end(one, _steps(one, case, 1, 3)))
            one.deepspeed.destroy()
        seen.append(ends)
    return seen


def test_a_checkpoint_of_a_first_step_that_was_skipped_is_taken(tmp_path: Path) -> None:
    """Its moments are there, zero, after no step of the optimizer."""
    for ranks in run_ranks(_begin_with_a_skip, 2, NONE_TAKEN, tmp_path):
        for case, (at_once, gone_back, loaded) in zip(NONE_TAKEN, ranks, strict=True):
            assert at_once["count"] == 2, case
            assert gone_back == at_once and loaded == at_once, case
