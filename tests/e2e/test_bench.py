"""`megalite bench` and `megalite scaling` as a user runs them: real runs, their numbers, and mistakes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_config
from tests.helpers.commands import BIN, command_line, metrics, run

pytestmark = pytest.mark.slow


def test_two_variants_and_a_report_on_their_runs(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Two real runs; all else is read from them: the table, a second call, and a scaling report on the same folders."""
    tiny["checkpoint"], tiny["training"]["evaluation"] = {"interval": 1}, {"interval": 1, "samples": 4}
    config, folder = write_config(tmp_path / "c.yaml", tiny), tmp_path / "series"
    varied = ["--vary", "training.global_batch_size=4,16", "--steps", "4", "--warm-up", "2", "--rounds", "1"]
    words = ["bench", str(config), *varied, "-o", str(folder), "--json"]
    done = run(BIN / "megalite", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    small, large = found["points"]
    assert [small["name"], large["name"]] == ["global_batch_size=4", "global_batch_size=16"]
    for point, batch in ((small, 4), (large, 16)):
        run_dir = Path(point["runs"][0])
        records = metrics(run_dir)
        assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6] and "evaluation_loss" not in records[-1]
        assert not (run_dir / "checkpoints").exists()
        # what rank 0 timed by itself is less than from meeting to meeting, by logging and the meeting
        timed = statistics.median(record["step_time_s"] for record in records[2:])
        step_s = point["step_s"]["median"]
        assert timed <= step_s * 1.001
        assert point["tokens_per_s"]["median"] == pytest.approx(batch * 32 / step_s)
        assert sum(point["parts_s"].values()) == pytest.approx(step_s) and point["memory_peak_mib"] > 50
    assert not small["is_distinguishable"], "one round shows no spread"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    again = command_line(*words, env={"DS_ACCELERATOR": "cpu"})
    assert again.returncode == 0 and json.loads(again.stdout) == found
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == before
    report = tmp_path / "report"
    scaled = command_line("scaling", "--from", *small["runs"], "--warm-up", "2", "-o", str(report), "--json")
    assert scaled.returncode == 0, scaled.stderr
    assert json.loads(scaled.stdout)["points"][0]["efficiency"] == 1.0
    assert {path.name for path in report.iterdir()} == {"scaling.html", "scaling.csv", "scaling.json"}
