"""What weak and strong scaling hold, and what runs of others must have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.experiments.scaling_points import Grow, kind_of, parse_ranks, points_of_runs, scaling_points
from megalite.config import Config
from tests.unit.launch.experiments.conftest import MeasuredRun

BATCH = "training.global_batch_size"


def options(config: Config, ranks: list[int], grow: Grow, *, is_weak: bool) -> list[dict[str, str]]:
    points = scaling_points(config, ranks, grow, is_weak=is_weak, on_cpu=True)
    return [dict(override.split("=") for override in point.overrides) for point in points]


@pytest.fixture
def config(tiny: dict[str, Any]) -> Config:
    return Config.model_validate(tiny | {"parallel": {"tensor_parallel_size": 2}})


def test_weak_scaling_holds_the_batch_of_a_replica(config: Config) -> None:
    found = options(config, [2, 4, 8], "data", is_weak=True)
    assert [int(one[BATCH]) / int(one["parallel.data_parallel_size"]) for one in found] == [4, 4, 4]
    assert [one["parallel.data_parallel_size"] for one in found] == ["1", "2", "4"]


def test_strong_scaling_holds_the_global_batch(config: Config) -> None:
    for grow, size in (("data", "data_parallel_size"), ("tensor", "tensor_parallel_size")):
        found = options(config, [2, 4], grow, is_weak=False)  # type: ignore[arg-type]
        assert [one[BATCH] for one in found] == ["4", "4"]
        assert int(found[1][f"parallel.{size}"]) == 2 * int(found[0][f"parallel.{size}"])


def test_ranks_that_the_layout_cannot_have_are_refused(config: Config) -> None:
    with pytest.raises(LaunchError, match=r"--ranks 3: .*tensor_parallel_size 2 .* use 2 or 4 ranks"):
        scaling_points(config, [3], "data", is_weak=False, on_cpu=True)
    with pytest.raises(LaunchError, match=r"--ranks 6: --weak multiplies the replicas of the smallest point"):
        scaling_points(config, [4, 6], "data", is_weak=True, on_cpu=True)
    with pytest.raises(LaunchError, match="--grow tensor adds no replica: use --grow data, or --strong"):
        scaling_points(config, [2], "tensor", is_weak=True, on_cpu=True)
    for text in ("", "1,,2", "0,1", "two", "1,-2", "²"):
        with pytest.raises(LaunchError, match="write numbers of ranks"):
            parse_ranks(text)
    assert parse_ranks("4, 1,2,2") == [1, 2, 4]


def test_runs_tell_what_they_held(measured_run: MeasuredRun) -> None:
    runs = {
        name: measured_run(name, {"forward": 0.1}, data_parallel_size=ranks, global_batch_size=batch)
        for name, ranks, batch in (("a", 1, 4), ("b", 2, 8), ("c", 2, 4), ("d", 4, 4), ("a2", 1, 4))
    }
    assert kind_of(points_of_runs([runs["b"], runs["a"]], 2)) == "weak"
    assert kind_of(points_of_runs([runs["a"], runs["c"]], 2)) == "strong"
    assert kind_of(points_of_runs([runs["a"], runs["b"], runs["d"]], 2)) == "mixed"
    points = points_of_runs([runs["c"], runs["a2"], runs["a"]], 2)
    assert [(point.name, len(point.runs)) for point in points] == [("tp1 pp1 dp1", 2), ("tp1 pp1 dp2", 1)]


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
