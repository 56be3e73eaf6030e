"""Real ranks: what a run says that it will need, what it then needed, and that it trains where nothing can be said."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from launch.planning.calibration import fit, read_run
from launch.prediction.this_machine import describe_machine
from tests.helpers.commands import metrics
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow


@pytest.fixture
def two_stages(tiny: dict[str, Any]) -> dict[str, Any]:
    """Long enough to be calibrated on; on a CPU that is measured already, which a busy machine takes its time for."""
    describe_machine(2, on_cpu=True)
    tiny["training"]["steps"] = 10
    return tiny | {"parallel": {"pipeline_parallel_size": 2}, "monitor": {"plot": False, "report": False}}


def receipt_of(config: dict[str, Any]) -> Any:
    return json.loads((Path(config["run_dir"]) / "receipt.json").read_text())


def test_a_run_says_what_it_will_need_and_what_it_needed(two_stages: dict[str, Any], tmp_path: Path) -> None:
    said = train(tmp_path, two_stages).splitlines()
    predicted = [number for number, line in enumerate(said) if " megalite: predicted: " in line]
    first_step = next(number for number, line in enumerate(said) if " step 1/10 " in line)
    assert len(predicted) == 2 and max(predicted) < first_step
    assert "peak memory" in said[predicted[0]] and "a step on " in said[predicted[1]]
    after = said[first_step:]
    assert any(" megalite: a step: predicted " in line and "median of 7" in line for line in after), said
    memory = next(line for line in after if " megalite: peak memory: " in line)
    assert "stage 0 predicted" in memory and "stage 1 predicted" in memory and memory.count(", measured ") == 2
    assert any("goodput" in line for line in after)

    receipt = receipt_of(two_stages)
    prediction, measured = receipt["prediction"], receipt["measured"]
    assert [stage["stage"] for stage in prediction["memory"]] == [0, 1] and prediction["problem"] is None
    assert prediction["step_time_s"] == pytest.approx(sum(prediction["parts_s"].values()))
    assert prediction["accelerator"] and prediction["efficiency"] == prediction["whole_accelerator"]["efficiency"]
    records = metrics(two_stages["run_dir"])
    times = sorted(record["step_time_s"] - record["data_wait_s"] for record in records[3:])
    assert measured["steps"] == 7 and measured["step_time_s"] == pytest.approx(times[3])
    assert len(measured["ranks"]) == 2
    for rank in measured["ranks"]:
        assert rank["peak_mib"] >= rank["process_mib"] > 50
    assert measured["ranks"][0]["peak_mib"] >= records[-1]["memory_peak_mib"]

    (found,) = fit([read_run(Path(two_stages["run_dir"]))])
    assert found.runs[0].measured_s == measured["step_time_s"]


def _nothing_works(_: Path, rank: int) -> None:
    from launch.errors import LaunchError
    from launch.prediction import prediction
    from launch.trainer import prediction_tracker as prediction_tracker

    def unknown(*_: Any, **__: Any) -> Any:
        raise LaunchError("the catalogue has no GPU 'L4'")

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    prediction_tracker.describe_machine = unknown
    prediction.SessionMeasurement.add = broken  # type: ignore[method-assign]
    prediction_tracker.comparison = broken
    if rank == 1:
        prediction_tracker.PredictionTracker.memory = lambda _: None  # type: ignore[method-assign]


def test_a_run_of_which_nothing_can_be_said_is_unharmed(two_stages: dict[str, Any], tmp_path: Path) -> None:
    said = train(tmp_path, two_stages, fault=(_nothing_works, ()))
    assert "megalite: predicted: no step time, because the catalogue has no GPU 'L4'" in said
    assert "the prediction failed once, training goes on: ZeroDivisionError: a bug of ours" in said
    records, receipt = metrics(two_stages["run_dir"]), receipt_of(two_stages)
    assert [record["step"] for record in records] == list(range(1, 11)) and receipt["outcome"]["finished"] is True
    assert receipt["failures"]["the prediction"]["count"] == 11  # ten steps, and the comparison
    assert receipt["prediction"]["problem"] == "the catalogue has no GPU 'L4'" and receipt["prediction"]["memory"]
    measured = receipt["measured"]
    assert measured["step_time_s"] is None and measured["ranks"][1] is None and measured["ranks"][0]["peak_mib"] > 50


def _dies_when_asked(_: Path, rank: int) -> None:
    from launch.trainer.prediction_tracker import PredictionTracker

    if rank == 1:
        PredictionTracker.memory = lambda _: os._exit(9)  # type: ignore[method-assign, assignment]


def test_a_rank_that_dies_before_it_answers_keeps_nobody_waiting(two_stages: dict[str, Any], tmp_path: Path) -> None:
    with session(tmp_path, two_stages, fault=(_dies_when_asked, ())) as running:
        began = time.monotonic()
        codes = running.wait(60)
        assert codes[1] == 9 and codes[0] not in (0, None), running.output()
        assert time.monotonic() - began < 60
    events = [json.loads(line)["event"] for line in (Path(two_stages["run_dir"]) / "events.jsonl").open()]
    assert "ended" in events, "goodput was written down before all were asked"
    assert [record["step"] for record in metrics(two_stages["run_dir"])] == list(range(1, 11))
    assert (Path(two_stages["run_dir"]) / "checkpoints" / "latest").read_text() == "step_00000010"
    assert receipt_of(two_stages)["measured"]["ranks"] == []
