"""The length of a run and its forecast, held against closed forms written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import Config
from megalite.planner.cost.checkpoints import Save, planned_interval_s
from megalite.planner.failure_rates import mtbf_hours
from megalite.planner.forecast import RunForecast, forecast_of, reliability_of
from megalite.planner.run_length import RunLength, run_length
from megalite.planner.workload import ParallelLayout, TrainingWorkload
from tests.helpers.sizes import TINY_SIZES

BATCH, SEQUENCE, STEP_S = 64, 512, 3.5


def config_of(checkpoint: dict[str, Any] | None = None, **training: Any) -> Config:
    return Config.model_validate(
        {
            "run_dir": "x",
            "model": TINY_SIZES | {"max_position_embeddings": SEQUENCE},
            "data": {"path": "unused"},
            "training": {"global_batch_size": BATCH, "micro_batch_size": 1, "sequence_length": SEQUENCE, **training},
            "checkpoint": checkpoint or {},
        }
    )


def forecast(config: Config, accelerators: int = 32, batch: int = BATCH) -> RunForecast:
    job = TrainingWorkload(config.model, ParallelLayout(1, 1, accelerators), SEQUENCE, batch)
    return forecast_of(config, job, STEP_S, 8)


def test_length_of_steps_and_of_tokens() -> None:
    length = replace(run_length(config_of(steps=1000), STEP_S, 16), goodput=0.5)
    assert (length.steps, length.tokens, length.training_s) == (1000, 1000 * BATCH * SEQUENCE, 3500)
    assert length.wall_s == 7000 and length.days == 7000 / 86_400
    assert length.accelerator_hours == pytest.approx(16 * 7000 / 3600)
    assert length.price(2.5) == pytest.approx(2.5 * 16 * 7000 / 3600)
    tokens = 10 * BATCH * SEQUENCE + 1
    assert run_length(config_of(tokens=tokens), STEP_S, 16).steps == 11, "the last step is a whole one"


def test_the_length_of_a_larger_batch() -> None:
    larger = run_length(config_of(steps=1000), STEP_S, 1, global_batch_size=3 * BATCH)
    assert (larger.steps, larger.tokens) == (334, 1000 * BATCH * SEQUENCE), "as many tokens"


def test_a_length_in_words() -> None:
    length = RunLength(71_526, 300_000_000_000, 22.9, 32, 0.98)
    assert str(length) == "71,526 steps, 300 billion tokens: 19.3 days, 14,857 accelerator-hours"
    assert str(RunLength(1, 512, 2.0, 1)) == "1 step, 512 tokens: 2.00 s, 0.00056 accelerator-hours"
    assert "never done" in str(replace(length, goodput=0.0)) and not replace(length, goodput=1e-4).ends


@given(st.integers(1, 64).map(lambda nodes: 8 * nodes), st.booleans(), st.floats(1, 1e5))
def test_the_interval_is_that_of_a_run_with_the_same_saves(accelerators: int, background: bool, hours: float) -> None:
    """What `checkpoint.interval: auto` of a run would take that measures the save of the plan."""
    config = config_of({"background": background, "mean_hours_between_failures": hours}, steps=100)
    scale = forecast(config, accelerators).scale
    assert scale.mtbf_hours == pytest.approx(hours)
    save = Save(scale.save_blocked_s, scale.save_duration_s)
    assert scale.interval_s == pytest.approx(planned_interval_s(save, hours * 3600))
    assert (save.duration_s > save.blocked_s) == background


def test_the_wall_time_is_that_of_the_goodput() -> None:
    seen = forecast(config_of(steps=1_000_000))
    assert seen.scale.mtbf_hours == pytest.approx(mtbf_hours(4.0, 4)), "four nodes of eight"
    assert 0 < seen.length.goodput == seen.scale.goodput < 1
    assert sum(seen.scale.hours.values()) == pytest.approx(24 * seen.length.days)
    assert seen.scale.hours["computation"] * 3600 == pytest.approx(1_000_000 * STEP_S)
    assert seen.length_at(1.0).wall_s == 1_000_000 * STEP_S


def test_a_stated_interval_counts_in_steps() -> None:
    """500 steps of 3.5 s; 0 is the whole run, which M (e^(T/M) - 1) of wall time takes from failure to failure."""
    assert forecast(config_of({"interval": 500}, steps=10_000)).scale.interval_s == 1750
    assert forecast(config_of({"interval": 500}, steps=10)).scale.interval_s == pytest.approx(35)
    mtbf_h, steps = 2.0, 1000
    whole = forecast(config_of({"interval": 0, "mean_hours_between_failures": mtbf_h}, steps=steps))
    mtbf_s, training_s = mtbf_h * 3600, steps * STEP_S
    down_s, save_s = whole.assumed.down_s, whole.scale.save_blocked_s
    behind_s = whole.scale.save_duration_s - save_s
    expected_s = mtbf_s * math.exp((down_s + behind_s) / mtbf_s) * math.expm1((training_s + save_s) / mtbf_s)
    assert whole.length.wall_s == pytest.approx(expected_s, rel=1e-9)
    never = forecast(config_of({"interval": 0, "mean_hours_between_failures": mtbf_h}, steps=1_000_000))
    assert not never.length.ends and never.assumed.days == pytest.approx(1_000_000 * STEP_S / 86_400)


def test_failures_of_a_config_are_of_one_size_of_job() -> None:
    config = config_of({"mean_hours_between_failures": 10.0}, steps=1)
    assert reliability_of(config, 8).rate_per_1000_node_days == 4.0
    assert mtbf_hours(reliability_of(config, 8, 64).rate_per_1000_node_days, 8) == pytest.approx(10)


def test_accelerators_that_fill_no_node_fail_with_it() -> None:
    assert forecast(config_of(steps=10), accelerators=12).scale.nodes == 2
    assert forecast(config_of(steps=10), accelerators=12).length.accelerators == 12
