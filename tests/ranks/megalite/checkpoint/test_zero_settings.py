"""Checkpoints of engines whose ZeRO keeps its state in another place or cut than usual: to the bit where they were, and
on one process within 2e-5, which shows that each number has the right name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.reader import CheckpointReader
from megalite.config import ConfigError, load_config
from tests.helpers.engine_cases import Case, engine_of, trained_steps
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save
from tests.ranks.megalite.checkpoint.test_layout_matrix import Numbers, resumed

STEPS, SAVED_AT, BATCH = 5, 2, 6
ON_HOST = {"optimizer": "cpu"}
CASES = {
    "persistent parameters": Case(dp=2, zero=3, zero_options={"stage3_param_persistence_threshold": 100_000}),
    "some persistent": Case(dp=3, zero=3, micro_batch=2, zero_options={"stage3_param_persistence_threshold": 1000}),
    "sub-groups": Case(dp=2, zero=3, zero_options={"sub_group_size": 1000}),
    "zero 3 offload": Case(dp=2, zero=3, offload=ON_HOST),
    "zero 1 offload": Case(dp=2, zero=1, offload=ON_HOST),
}


def on_and_back(rank: int, case: Case, root: Path) -> tuple[Numbers, Numbers]:
    """What follows the save, and what follows when the same engine goes back to it."""
    engine = engine_of(case)
    trained_steps(engine, case, 0, SAVED_AT)
    assert save(engine, root, SAVED_AT, background=True).failure is None
    whole = trained_steps(engine, case, SAVED_AT, STEPS)
    load_engine(engine, CheckpointReader(root / f"step_{SAVED_AT:08d}"), weights_only=False)
    return whole, trained_steps(engine, case, SAVED_AT, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_comes_back_here_and_on_one_process(name: str, tmp_path: Path) -> None:
    case = dataclasses.replace(CASES[name], steps=STEPS, global_batch=BATCH)
    whole, again = run_ranks(on_and_back, case.world_size, case, tmp_path)[0]
    assert again == whole
    serial = dataclasses.replace(Case(), steps=STEPS, global_batch=BATCH)
    (found,) = run_ranks(resumed, 1, serial, {name: tmp_path / f"step_{SAVED_AT:08d}"})
    assert found[name] == [pytest.approx(step, rel=2e-5) for step in whole]


def saving(rank: int, case: Case, root: Path) -> Numbers:
    """What follows a save."""
    engine = engine_of(case)
    trained_steps(engine, case, 0, SAVED_AT)
    assert save(engine, root, SAVED_AT, background=True).failure is None
    return trained_steps(engine, case, SAVED_AT, STEPS)


@pytest.mark.slow
def test_a_run_goes_on_with_its_optimizer_on_the_host(tmp_path: Path) -> None:
    """From a checkpoint of one process, whose optimizer was where it computes; the moments must come along."""
    here, there = (
        dataclasses.replace(case, steps=STEPS, global_batch=BATCH)
        for case in (Case(), Case(pp=2, dp=2, zero=2, offload=ON_HOST | {"activations": "cpu"}))
    )
    (whole,) = run_ranks(saving, 1, here, tmp_path)
    found = run_ranks(resumed, 4, there, {"one process": tmp_path / f"step_{SAVED_AT:08d}"})[0]
    assert found["one process"] == [pytest.approx(step, rel=2e-5) for step in whole]


def test_what_would_give_numbers_wrong_names_is_refused() -> None:
    """DeepSpeed trains right with it, on every layout; its fp32 state is read and written in another order."""
    option = "deepspeed.zero_optimization.round_robin_gradients=true"
    with pytest.raises(ConfigError, match="no checkpoint would be right: remove it"):
        load_config(Path("configs/quickstart.yaml"), [option])
