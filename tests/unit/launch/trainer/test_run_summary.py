"""The summary of a run: its dry run prints it, its JSON has the same, and rank 0 logs it at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.prediction.prediction import Prediction
from launch.prediction.this_machine import MeasurementLimits, describe_machine
from launch.runtime.rank_environment import Rank
from launch.trainer.data.opening import open_data
from launch.trainer.run_summary import (
    format_total,
    log_start,
    prediction_facts,
    prediction_lines,
    run_facts,
    summary_lines,
    warning_of_long_step,
    warning_of_room,
    warning_of_warmup,
)
from launch.trainer.start.checks import find_position
from launch.trainer.start.flags import NO_FLAGS
from launch.trainer.start.resume import RunSetup, Start
from megalite.config import Config, resolve_layout
from megalite.planner.cost.stage_parameters import parameters
from tests.unit.launch.cli.test_mistakes import own_checkpoint


def test_a_fraction_that_holds_out_nothing_is_said(tiny: dict[str, Any]) -> None:
    """A hundredth of 150 conversations was none of them, and silently all were trained on."""
    tiny["training"]["evaluation"] = {"interval": 0}
    for fraction, is_said in ((1e-9, True), (0.3, False), (0.0, False)):
        tiny["data"]["held_out_fraction"] = fraction
        notices = open_data(Config.model_validate(tiny)).notices
        assert any("holds out none of the documents of" in notice for notice in notices) == is_said, fraction


def test_facts_are_those_of_the_run(tiny: dict[str, Any]) -> None:
    tiny["parallel"] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    tiny["training"] |= {"steps": 1000, "evaluation": {"interval": 5, "samples": 8}}
    tiny["recompute"] = {"mode": ["full", "none"]}
    config = Config.model_validate(tiny)
    layout, data = resolve_layout(config, 4, "cpu"), open_data(config)
    facts = run_facts(config, layout, data, Start(), "4 ranks on vm")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["batch"]["tokens"] == 4 * 32 and facts["batch"]["micro_batches"] == 2
    assert facts["length"] == {"steps": 1000, "steps_left": 1000, "tokens_left": 128_000}
    assert facts["data"]["epochs"] == pytest.approx(4000 / data.training.samples_per_epoch)
    lines = dict(summary_lines(facts))
    assert lines["run"] == f"{config.run_dir}, new" and "tensor 2 x pipeline 2 x data 1, ZeRO-1: " in lines["layout"]
    assert "stage 0 (embedding, layers 0-1)" in lines["per rank"] and "stage 1 (layer 2, head)" in lines["per rank"]
    assert lines["recompute"] == "stage 0 full, stage 1 none"
    assert "4 samples x 32 tokens = 128 tokens a step; on each replica 2 micro-batches of 2" in lines["batch"]
    assert "each time in another order" in lines["data"]
    assert lines["length"] == "1,000 steps, 128,000 tokens; evaluated on 8 samples every 5 steps"
    assert "offload" not in lines
    tiny["parallel"] |= {"pipeline_schedule": "interleaved", "zero_stage": 3}
    tiny["model"] |= {"num_hidden_layers": 4}
    interleaved = Config.model_validate(tiny)
    facts = run_facts(interleaved, resolve_layout(interleaved, 4, "cpu"), data, Start(), "4 ranks on vm")
    parts = "tensor 2 x pipeline 2 (interleaved, 2 chunks a stage) x data 1, ZeRO-3 (experimental in a pipeline): "
    assert dict(summary_lines(facts))["layout"].startswith(parts)
    tiny["offload"] = {"optimizer": "cpu", "activations": "cpu"}
    tiny["parallel"] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    facts = run_facts(Config.model_validate(tiny), layout, data, Start(), "4 ranks on vm")
    assert dict(summary_lines(facts))["offload"] == "optimizer and activations in the memory of the host"


def test_epochs_count_what_a_resumed_run_has_taken_before(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Its first two steps took 20 samples, of another batch size; two of 4 samples are left."""
    own_checkpoint(consumed_samples=20)(tiny, tmp_path)
    position = find_position(Config.model_validate(tiny), NO_FLAGS, is_dry=True)
    layout = resolve_layout(position.config, 1, "cpu")
    facts = run_facts(position.config, layout, position.data, position.start, "1 rank")
    samples = position.data.training.samples_per_epoch
    assert facts["length"]["steps_left"] == 2 and facts["data"]["epochs"] == pytest.approx((20 + 2 * 4) / samples)


def test_a_warm_up_in_epochs_is_told_in_steps_of_the_data(tiny: dict[str, Any]) -> None:
    """Half an epoch, with four samples a step: the data is open where a start is looked for."""
    tiny["schedule"], tiny["training"]["steps"] = {"name": "constant", "warmup_epochs": 0.5}, 5000
    position = find_position(Config.model_validate(tiny), NO_FLAGS, is_dry=True)
    layout = resolve_layout(position.config, 1, "cpu")
    facts = run_facts(position.config, layout, position.data, position.start, "1 rank")
    step = -(-position.data.training.samples_per_epoch // 8)
    assert ("learning rate", f"step {step:,}: 3.000e-04, the warm-up is over") in summary_lines(facts)


def test_what_is_predicted_is_told_as_far_as_it_is_known(tiny: dict[str, Any]) -> None:
    config = Config.model_validate(tiny)
    layout = resolve_layout(config, 1, "cpu")
    facts = run_facts(config, layout, open_data(config), Start(), "1 rank")
    machine = describe_machine(1, on_cpu=True, limits=MeasurementLimits(timeout_s=0.0, allow_typical=True))
    known = prediction_facts(facts, Prediction.of(config, layout, machine), None)
    assert known["seconds_left"] == pytest.approx(4 * known["step_s"]) and known["rough"]
    assert "roughly " in dict(prediction_lines(known))["time"]
    unknown = prediction_facts(facts, Prediction.of(config, layout, None, "the catalogue has no GPU 'L4'"), None)
    assert dict(prediction_lines(unknown))["time"] == "not known, because the catalogue has no GPU 'L4'"


@pytest.mark.parametrize("busy", ["", "somebody else computes here too"])
@pytest.mark.parametrize("calibrated_on", ["a guess: calibrate it", "a run"])
def test_the_summary_and_the_prediction_agree_on_what_is_rough(
    calibrated_on: str, busy: str, tiny: dict[str, Any]
) -> None:
    config = Config.model_validate(tiny)
    layout = resolve_layout(config, 1, "cpu")
    here = describe_machine(1, on_cpu=True, limits=MeasurementLimits(timeout_s=0.0, allow_typical=True))
    kind = here.whole.model_copy(update={"calibrated_on": calibrated_on})
    prediction = Prediction.of(config, layout, replace(here, whole=kind, rough="", busy=busy))
    facts = run_facts(config, layout, open_data(config), Start(), "1 rank")
    known = prediction_facts(facts, prediction, None)
    time, (_, sentence) = dict(prediction_lines(known))["time"], prediction.sentences()
    is_rough = bool(busy) or calibrated_on != "a run"
    assert ("roughly" in time, "roughly" in sentence) == (is_rough, is_rough), (time, sentence)
    assert known["rough"] == prediction.facts()["rough"]


def test_a_guess_has_one_digit() -> None:
    assert format_total(71_526 * 22.94, None) == "19 days, without evaluations and saves"
    assert format_total(1000 * 22.94, "why") == "roughly 6 h, without evaluations and saves"


def test_a_step_of_days_is_said_plainly() -> None:
    assert warning_of_long_step(60.0, 8) is None
    warning = warning_of_long_step(263_431.0, 1_000_000)
    assert warning is not None and "about 3 days" in warning and "global_batch_size is 1,000,000" in warning


def test_a_warmup_that_never_ends_is_warned_of(tiny: dict[str, Any]) -> None:
    for warmup, is_warned in ((4, False), (5, True)):
        config = Config.model_validate(tiny | {"schedule": {"warmup_steps": warmup}}).model_copy(
            update={"training": Config.model_validate(tiny).training.model_copy(update={"steps": 4})}
        )
        assert ("warmup_steps 5 is longer than the run of 4 steps" in str(warning_of_warmup(config))) == is_warned


def test_a_disk_too_small_for_a_checkpoint_is_warned_of(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 weights and two moments of AdamW."""
    config = Config.model_validate(tiny)
    size = 12 * parameters(config.model)
    for free, is_warned in ((size, False), (size - 1, True)):
        monkeypatch.setattr("launch.trainer.run_summary.room_at", lambda folder, free=free: free)
        assert (warning_of_room(config) is not None) == is_warned


def test_rank_0_tells_what_it_starts(tiny: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    config = Config.model_validate(tiny)
    setup = RunSetup(config, resolve_layout(config, 1, "cpu"), Rank(0, 0, 1), open_data(config), Start())
    log_start(setup, "1 rank on vm (EPYC)", "predicted memory: too much")
    out, err = capfd.readouterr()
    labels = [line.removeprefix("megalite: ").partition(":")[0] for line in out.splitlines()]
    assert labels == ["run", "model", "layout", "per rank", "recompute", "batch", "data", "length"]
    assert "1 rank on vm (EPYC)" in out and err == "megalite: warning: predicted memory: too much\n"
