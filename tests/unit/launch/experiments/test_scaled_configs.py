"""What weak and strong scaling hold."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.experiments import scaled_configs as scaled_configs_module
from launch.experiments.scaled_configs import SIZES, Grow, parse_ranks, scaled_configs
from megalite.config import Config
from tests.helpers.machines import cpus

BATCH = "training.global_batch_size"


def options(config: Config, ranks: list[int], grow: Grow, *, is_weak: bool) -> list[dict[str, str]]:
    points = scaled_configs(config, ranks, grow, is_weak=is_weak)
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


def test_the_planner_may_choose_the_layout_of_each_point(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is stated: a data-parallel size of auto would take all GPUs of the machine at every point."""
    monkeypatch.setattr(scaled_configs_module, "here", cpus)
    for ranks, one in zip((1, 2, 4), options(config, [1, 2, 4], "auto", is_weak=False), strict=True):
        assert prod(int(one[f"parallel.{size}"]) for size in SIZES.values()) == ranks


def test_ranks_that_the_layout_cannot_have_are_refused(config: Config) -> None:
    with pytest.raises(LaunchError, match=r"--ranks 3: .*tensor_parallel_size 2 .* use 2 or 4 ranks"):
        scaled_configs(config, [3], "data", is_weak=False)
    with pytest.raises(LaunchError, match=r"--ranks 6: --weak multiplies the replicas of the smallest point"):
        scaled_configs(config, [4, 6], "data", is_weak=True)
    with pytest.raises(LaunchError, match="--grow tensor adds no replica: use --grow data, or --strong"):
        scaled_configs(config, [2], "tensor", is_weak=True)
    for text in ("", "1,,2", "0,1", "two", "1,-2", "²"):
        with pytest.raises(LaunchError, match="write numbers of ranks"):
            parse_ranks(text)
    assert parse_ranks("4, 1,2,2") == [1, 2, 4]
