"""When a restart of a run on several hosts waits for hosts, and when it gives up."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from launch.cluster.host_selection import NotEnoughHosts
from launch.cluster.hosts_supervisor import HostsSupervisor, Options
from launch.errors import LaunchError
from launch.runtime.hostfile import Host
from launch.supervision.supervisor import Policy
from megalite.config import Config


@pytest.fixture
def two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Host, Host]:
    """Two names of this machine, reached by shells instead of ssh: of two that are one, the second is not fit."""
    for name in ("ssh", "pdsh"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return Host("node1", (0,)), Host("node2", (0,))


def test_an_unreachable_host_is_told_once(
    tiny: dict[str, Any], two_names: tuple[Host, Host], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings of the check and the error that follows from it said the same three times."""
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho 'ssh: no route to host' >&2\nexit 255\n")
    with HostsSupervisor(Config.model_validate(tiny), two_names[:1], Policy(), Options()) as supervisor:
        supervisor._attempts = 1
        with pytest.raises(NotEnoughHosts, match=r"1 rank is needed, .* 0 slots \(host node1 .*no route to host"):
            supervisor._assign_hosts()
    assert not [record for record in caplog.records if "no route" in record.getMessage()]


def test_a_run_that_does_not_fit_the_hosts_that_are_left_waits_for_the_others(
    tiny: dict[str, Any], two_names: tuple[Host, Host]
) -> None:
    """One of two is lost, and half of the memory with it: it may be booting."""
    tiny["model"] |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 400}
    config = Config.model_validate(tiny | {"parallel": {"data_parallel_size": "auto"}})
    with HostsSupervisor(config, two_names, Policy(), Options()) as supervisor:
        supervisor._attempts = 2
        with pytest.raises(NotEnoughHosts, match=r"hosts that are left: this layout, .* needs .* and the host has"):
            supervisor._assign_hosts()
    with HostsSupervisor(config, two_names[:1], Policy(), Options()) as supervisor:
        supervisor._attempts = 2
        with pytest.raises(LaunchError, match=r"this layout, .* needs .* and the host has") as told:
            supervisor._assign_hosts()
        assert not isinstance(told.value, NotEnoughHosts), "nobody is missing"


def test_locks_of_extensions_that_ranks_compile_are_removed_and_no_others(
    tiny: dict[str, Any], two_names: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts were refused for a lock of DeepSpeed's CPU collective, which another program left and no rank builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    theirs, own = (tmp_path / "extensions" / name / "lock" for name in ("deepspeed_shm_comm", "async_io"))
    for lock in (theirs, own):
        lock.parent.mkdir(parents=True)
        lock.touch()
    with HostsSupervisor(Config.model_validate(tiny), two_names[:1], Policy(), Options()) as supervisor:
        supervisor._attempts = 1
        assert [host.name for host in supervisor._assign_hosts().hosts] == ["node1"]
    tiny["deepspeed"] = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    config = Config.model_validate(tiny | {"parallel": {"zero_stage": 3}})
    with HostsSupervisor(config, two_names[:1], Policy(), Options()) as supervisor:
        supervisor._attempts = 1
        with pytest.raises(NotEnoughHosts, match=f"wait for ever for a lock .*rm {own}"):
            supervisor._assign_hosts()
        supervisor._attempts, supervisor._began = 2, time.monotonic() - 60
        assert [host.name for host in supervisor._assign_hosts().hosts] == ["node1"]
    assert theirs.exists() and not own.exists()
