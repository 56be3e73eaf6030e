"""Which numbers of accelerators of this machine a plan is made for."""

from __future__ import annotations

from typing import Any

import pytest

from launch.prediction import cluster as places
from launch.prediction.cluster import _cpu_counts, _on_gpus
from megalite.config import Config
from megalite.config.auto import CHOOSABLE, PIPELINE
from megalite.planner.hardware import Cluster, ClusterFile, cluster_of
from megalite.planner.search import TENSOR


def config_of(tiny: dict[str, Any], batch: int, **parallel: int) -> Config:
    tiny["training"] = tiny["training"] | {"global_batch_size": batch, "micro_batch_size": 1}
    return Config.model_validate(tiny | {"parallel": parallel})


def h100s(ranks: int) -> Cluster:
    return cluster_of(ClusterFile(accelerator="H100", nodes=1, accelerators_per_node=ranks), "test")


def test_fewer_gpus_are_taken_where_rules_refuse_all(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven GPUs cut neither the batch nor the model; six do."""
    monkeypatch.setattr(places, "here", h100s)
    result = _on_gpus(config_of(tiny, 6), 7, CHOOSABLE, None)
    assert result.cluster.accelerators == 6 and result.best is not None
    whole = _on_gpus(config_of(tiny, 6), 4, CHOOSABLE, None)
    assert whole.cluster.accelerators == 4, "as many as can be used"
    nothing = _on_gpus(config_of(tiny, 6, tensor_parallel_size=3), 2, frozenset(CHOOSABLE - {TENSOR}), None)
    assert nothing.best is None and nothing.cluster.accelerators == 2, "the refusal is of what there is"


@pytest.mark.parametrize(
    ("parallel", "free", "counts"),
    [
        ({}, CHOOSABLE, [1, 2, 3, 4]),
        ({"pipeline_parallel_size": 3}, CHOOSABLE - {PIPELINE}, [3]),
        ({"pipeline_parallel_size": 2}, CHOOSABLE - {PIPELINE}, [2, 4]),
        ({"tensor_parallel_size": 2}, CHOOSABLE - {TENSOR}, [2, 4]),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 3}, CHOOSABLE - {TENSOR, PIPELINE}, [12]),
        ({"data_parallel_size": 6}, CHOOSABLE, [6]),
    ],
)
def test_numbers_of_ranks_on_a_cpu_go_with_what_is_stated(
    tiny: dict[str, Any], parallel: dict[str, int], free: Any, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "cpu_count", lambda: 4)
    values = {"data_parallel_size": "auto"} | parallel
    assert _cpu_counts(config_of(tiny, 12, **values), frozenset(free)) == counts  # type: ignore[arg-type]
