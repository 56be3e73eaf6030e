"""Whole runs that meet bad data, decide themselves when to save, and find their checkpoints on a mirror."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manifest import read_manifest
from tests.e2e.conftest import References
from tests.helpers.audit import audit, events
from tests.helpers.commands import metrics
from tests.helpers.faults import poisoned
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

BATCH, STEPS = 4, 10
POISONED = 30  # a sample of step 8


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two pipeline stages that save every third step."""
    tiny["training"] |= {"steps": STEPS}
    parallel = {"pipeline_parallel_size": 2}
    return tiny | {"parallel": parallel, "checkpoint": {"interval": 3}, "monitor": {"plot": False, "report": False}}


def test_a_rollback_goes_on_behind_the_data_that_led_there(config: dict[str, Any], tmp_path: Path) -> None:
    """Step 8 is bad, step 6 is saved: steps 7 and 8 are done on what comes after, and a resume knows it."""
    config["guards"] = {"not_finite": "rollback"}
    said = train(tmp_path / "session", config, fault=(poisoned, (POISONED,)))
    run_dir = Path(config["run_dir"])
    assert "step 8" in said and "back to step 6, without samples 24 to 31" in said
    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["samples"] for record in records[:6]] == [[4 * n, 4 * n + 4] for n in range(6)]
    assert [record["samples"] for record in records[6:]] == [[4 * n, 4 * n + 4] for n in range(8, 12)]
    assert not any(record["skipped"] for record in records)
    (intervened,) = events(run_dir, "intervened")
    (rolled_back,) = events(run_dir, "rolled_back")
    assert intervened["action"] == "rollback" and POISONED in intervened["suspects"][0]["samples"]
    assert rolled_back["to_step"] == 6 and rolled_back["excluded_samples"] == [24, 32]
    state = read_manifest(run_dir / "checkpoints" / f"step_{STEPS:08d}").state
    assert state["excluded_samples"] == [[24, 32]] and state["consumed_samples"] == 4 * 12
    (lost,) = events(run_dir, "steps_lost")
    assert 0 < records[-1]["goodput"] < 1 and lost["lost_steps"] == 2


def test_skipped_data_changes_nothing_and_is_bounded(config: dict[str, Any], tmp_path: Path) -> None:
    said = train(tmp_path / "session", config, fault=(poisoned, (POISONED,)))
    records = metrics(config["run_dir"])
    assert [record["skipped"] for record in records] == [step == 8 for step in range(1, STEPS + 1)]
    assert records[6]["samples"][1] == records[7]["samples"][0] and records[7]["loss"] is None
    assert "step 8" in said and "samples 30, 31, which are document" in said


def test_a_guard_may_stop_the_run(config: dict[str, Any], tmp_path: Path) -> None:
    config["guards"] = {"not_finite": "stop"}
    with session(tmp_path / "session", config, fault=(poisoned, (POISONED,))) as running:
        assert running.wait() == [3, 3]
        assert "megalite: error: stopped: " in running.output(0) and "Traceback" not in running.output()
    run_dir = Path(config["run_dir"])
    assert [event["step"] for event in events(run_dir, "saved")] == [3, 6]
    assert len(events(run_dir, "stopped")) == 1 and not events(run_dir, "ended")


def test_the_interval_that_loses_least_is_found_and_told(config: dict[str, Any], tmp_path: Path) -> None:
    """A failure every third of a second of training: saves come every few steps, and the first one soon."""
    config["training"]["steps"] = 40
    config["checkpoint"] = {"interval": "auto", "mean_hours_between_failures": 1e-4}
    said = train(tmp_path / "session", config)
    saved = [event["step"] for event in events(Path(config["run_dir"]), "saved")]
    assert "checkpoint.interval auto: a save every" in said and "(as configured)" in said
    assert saved[0] <= 10 and len(saved) > 3 and saved[-1] == 40, saved


def test_a_run_goes_on_from_its_mirror(config: dict[str, Any], references: References, tmp_path: Path) -> None:
    """The machine is gone, and with it `run_dir`; what another machine finds is the mirror."""
    mirror = tmp_path / "mirror"
    config["checkpoint"] |= {"mirror": mirror.as_uri(), "keep_last": 2}
    train(tmp_path / "first", config, "training.max_minutes=null")
    run_dir = Path(config["run_dir"])
    mirrored = sorted(path.name for path in mirror.glob("step_*"))
    assert mirrored[-1] == "step_00000010" and len(mirrored) == 2
    assert "mirrored" in {event["event"] for event in events(run_dir, "mirrored")}
    whole = metrics(run_dir)
    shutil.rmtree(run_dir)
    shutil.rmtree(mirror / "step_00000010")
    said = train(tmp_path / "second", config)
    assert "fetching" in said and "resumes from step 9 of" in said
    assert [record["loss"] for record in metrics(run_dir)] == [whole[-1]["loss"]]
    assert (mirror / "step_00000010" / "manifest.json").is_file(), "the mirror gets the last checkpoint at the end"


def test_what_fails_beside_the_training_ends_nothing(
    config: dict[str, Any], references: References, tmp_path: Path
) -> None:
    """The picture cannot be drawn and the mirror is not there: the run is the same."""
    reference = references.of(config)
    config["monitor"] = {"plot": True}
    config["checkpoint"] |= {"mirror": "file:///proc/no/such/folder", "mirror_wait_minutes": 0.01}
    Path(config["run_dir"], "loss.png").mkdir(parents=True)
    said = train(tmp_path / "session", config)
    assert "loss.png" in said and "mirror" in said
    records = audit(Path(config["run_dir"]), STEPS, BATCH)
    assert [record["loss"] for record in records] == [record["loss"] for record in metrics(reference.run_dir)]
