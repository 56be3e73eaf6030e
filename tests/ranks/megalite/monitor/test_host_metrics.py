"""Four ranks on what they take for two hosts: the first one of each serves, and rank 0 names both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launch.runtime.local_ranks import free_port
from megalite.config import Config
from megalite.monitor.observer import Nonfatal
from megalite.monitor.prometheus import host
from tests.helpers.rank_pool import run_ranks


def _open(rank: int, values: dict[str, Any]) -> tuple[int | None, list[str]]:
    """The port of this rank, and what it says."""
    own, said = host.this_host, list[str]()
    host.this_host = lambda: (f"node{rank // 2}", "")
    try:
        opened = host.open_host_metrics(Config.model_validate(values), Nonfatal(said.append), said.append)
    finally:
        host.this_host = own
    if opened is None:
        return None, said
    assert opened.endpoint is not None
    dist.barrier(dist.new_group([0, 2], use_local_synchronization=True))  # both are open before one closes
    opened.close()
    return opened.endpoint.port, said


def test_one_port_a_host(tiny: dict[str, Any], tmp_path: Path) -> None:
    """All ranks of a host would fight for its port; a target that is left out is a host without metrics of its GPUs."""
    port = min(free_port(), 60_000)
    tiny["run_dir"] = str(tmp_path)
    tiny["monitor"] = {"prometheus": {"enabled": True, "port": port}}
    (first, said), (second, _), (third, said_there), (fourth, _) = run_ranks(_open, 4, tiny)
    assert second is None and fourth is None
    assert first is not None and third is not None and first != third, "here both are one host"
    (entry,) = json.loads((tmp_path / "prometheus_targets.json").read_text())
    assert entry["targets"] == sorted([f"127.0.0.1:{first}", f"127.0.0.1:{third}"])
    told = said + said_there
    assert sum(sentence.startswith(f"port {port} is taken on ") for sentence in told) >= 1
    assert any("only programs of the same host reach metrics at 127.0.0.1" in sentence for sentence in said)
