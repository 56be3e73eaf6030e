"""A run in fp16 finds its loss scale once, whatever happens to it: kills, and another layout after each."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manifest import read_manifest
from megalite.training.state import TrainState
from tests.helpers.commands import metrics
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

BATCH, STEPS, WINDOW, FIRST_POWER, PEAK = 4, 24, 4, 24, 1e-3
LAYOUTS = [
    {"pipeline_parallel_size": 2},  # the scale is on the device
    {"zero_stage": 2},  # it is DeepSpeed's, on the host
    {"tensor_parallel_size": 2, "sequence_parallel": True},
]
FP16 = {"initial_scale_power": FIRST_POWER, "hysteresis": 1, "loss_scale_window": WINDOW}


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    tiny["training"] |= {"steps": STEPS}
    schedule = {"name": "linear", "warmup_steps": 0, "min_learning_rate_ratio": 0.1}
    changed = {"precision": {"dtype": "fp16"}, "deepspeed": {"fp16": FP16}, "schedule": schedule}
    return tiny | changed | {"checkpoint": {"interval": 2}, "optimizer": {"learning_rate": PEAK}}


def test_skips_move_neither_data_nor_schedule_twice_over_kills_on_other_layouts(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """The scale starts far too large, and is raised often: skips come at first and all along.

    It is killed in the search and in a window of good steps, of which the checkpoint knows the number.
    """
    for layout, reached in zip(LAYOUTS, (4, 13), strict=False):
        with session(tmp_path / "session", config | {"parallel": layout}) as running:
            running.wait_until(lambda running=running, step=reached: f" step {step}/" in running.output(0))  # type: ignore[misc]
            running.send(signal.SIGKILL)
    train(tmp_path / "session", config | {"parallel": LAYOUTS[-1]})
    records = metrics(Path(config["run_dir"]))
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    scale, good = 2.0**FIRST_POWER, 0
    for step, record in enumerate(records, start=1):
        assert record["loss_scale"] == scale, f"step {step}"
        assert record["samples"] == [BATCH * (step - 1), BATCH * step], "each batch once, also where it is skipped"
        assert record["learning_rate"] == pytest.approx(PEAK * (1 - 0.9 * (step - 1) / (STEPS - 1)), rel=1e-12)
        good = 0 if record["skipped"] else good + 1
        scale *= 0.5 if record["skipped"] else 2.0 if good > 1 and (good - 1) % WINDOW == 0 else 1.0
    skips = [record["step"] for record in records if record["skipped"]]
    assert len(skips) > 4 and skips[:3] == [1, 2, 3] and max(skips) > 12, "in every session"
    manifest = read_manifest(Path(config["run_dir"]) / "checkpoints" / f"step_{STEPS:08d}")
    assert manifest.optimizer_steps == STEPS - len(skips)
    assert manifest.loss_scaler["cur_scale"] == scale
    assert TrainState.model_validate(manifest.state).skipped_steps == len(skips)
