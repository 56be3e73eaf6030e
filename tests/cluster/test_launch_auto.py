"""`parallel: auto` under `megalite launch`: a layout for the hosts of each attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.config import Config, load_config, resolve_layout
from tests.helpers.cluster_runs import Launched
from tests.helpers.hosts import Cluster

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_with_a_host_less_it_goes_on_in_another_layout(
    tiny: dict[str, Any], cluster_of: Callable[..., Cluster], tmp_path: Path
) -> None:
    """What was chosen for four ranks is chosen anew for the two that are left."""
    tiny["parallel"] = "auto"
    del tiny["training"]["micro_batch_size"]
    tiny["training"] |= {"global_batch_size": 4, "steps": 200}
    tiny["checkpoint"] = {"interval": 10, "keep_last": 3}
    cluster = cluster_of(2)
    hosts = "node1 slots=2\nnode2 slots=2\n"
    run = Launched(cluster, tmp_path / "launch", tiny, hosts, "--restarts", "3", "--wait-for-hosts", "0")
    run.wait_for_steps(12)
    first = _layout(run)
    assert resolve_layout(first, 4, "cpu").world_size == 4
    cluster.power_off("node2")
    run.end(280)
    last = _layout(run)
    assert resolve_layout(last, 2, "cpu").world_size == 2, run.said()
    assert run.said().count("auto: chose") == 2
    assert run.step() == 200
    assert [len(attempt["hosts"]) for attempt in run.attempts()][-1] == 1


def _layout(run: Launched) -> Config:
    stated = load_config(run.run_dir / "config.yaml")
    assert not stated.unresolved_options
    return stated
