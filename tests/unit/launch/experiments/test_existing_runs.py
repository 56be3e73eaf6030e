"""What runs of others must have in common, and what they tell of scaling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.experiments.existing_runs import points_of_runs, scaling_kind
from tests.unit.launch.experiments.conftest import MeasuredRun


def test_runs_tell_what_they_held(measured_run: MeasuredRun) -> None:
    runs = {
        name: measured_run(name, {"forward": 0.1}, data_parallel_size=ranks, global_batch_size=batch)
        for name, ranks, batch in (("a", 1, 4), ("b", 2, 8), ("c", 2, 4), ("d", 4, 4), ("a2", 1, 4))
    }
    assert scaling_kind(points_of_runs([runs["b"], runs["a"]], 2)) == "weak"
    assert scaling_kind(points_of_runs([runs["a"], runs["c"]], 2)) == "strong"
    assert scaling_kind(points_of_runs([runs["a"], runs["b"], runs["d"]], 2)) == "mixed"
    points = points_of_runs([runs["c"], runs["a2"], runs["a"]], 2)
    assert [(point.name, len(point.runs)) for point in points] == [("tp1 pp1 dp1", 2), ("tp1 pp1 dp2", 1)]


def test_ranks_that_share_sequences_count(measured_run: MeasuredRun) -> None:
    run = measured_run("a", {"forward": 0.1}, data_parallel_size=2)
    receipt = json.loads((run / "receipt.json").read_text())
    receipt["layout"]["context_parallel_size"] = 4
    (run / "receipt.json").write_text(json.dumps(receipt))
    (point,) = points_of_runs([run], 2)
    assert (point.name, point.ranks) == ("tp1 pp1 dp2 cp4", 8)


def test_runs_that_cannot_be_compared_are_refused(measured_run: MeasuredRun, tmp_path: Path) -> None:
    run = measured_run("a", {"forward": 0.1})
    precise = measured_run("b", {"forward": 0.1}, data_parallel_size=2, changes={"precision": {"dtype": "bf16"}})
    with pytest.raises(LaunchError, match=r"differ in precision\.dtype: a token is not the same work"):
        points_of_runs([run, precise], 2)
    with pytest.raises(LaunchError, match="does not exist"):
        points_of_runs([run, tmp_path / "nowhere"], 2)
    short = measured_run("c", {"forward": 0.1}, data_parallel_size=2, steps=1, warm_up=0)
    points = points_of_runs([run, short], 2)
    assert [bool(point.runs) for point in points] == [True, False]
    assert "nothing is measured" in points[1].failure
    with pytest.raises(LaunchError, match="nothing is measured"):
        points_of_runs([short], 2)
