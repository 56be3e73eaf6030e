"""Ranks that something else than `megalite launch` starts find each other, on hosts that are called 127.0.1.1 at home
as well, as Debian's installer does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_config
from tests.helpers.cluster_machine import why_no_hosts
from tests.helpers.commands import BIN, ROOT, metrics
from tests.helpers.hosts import Cluster
from tests.helpers.slurm_cluster import PROGRAMS_NEEDED, SlurmCluster
from tests.unit.launch.runtime.test_rank_environment import without_ranks

pytestmark = pytest.mark.slow

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def debian(cluster_of: Callable[..., Cluster]) -> Cluster:
    return cluster_of(2, debian_hosts=True)


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages, on two hosts."""
    return tiny | {"parallel": {"pipeline_parallel_size": 2}, "monitor": {"plot": False, "report": False}}


def test_deepspeed_alone_trains_and_tells_what_it_lacks(
    debian: Cluster, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    path = write_config(tmp_path / "c.yaml", config)
    (tmp_path / "environment").write_text("".join(f"{name}={value}\n" for name, value in ENVIRONMENT.items()))
    words = [BIN / "deepspeed", "--hostfile", tmp_path / "hosts", "--master_addr", debian.hosts["node1"].ip]
    done = debian.hosts["head"].run(
        [*words, ROOT / "launch" / "train.py", path],
        cwd=ROOT,
        timeout=240,
        env=without_ranks() | ENVIRONMENT | {"DS_ENV_FILE": str(tmp_path / "environment")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(config["run_dir"])) == config["training"]["steps"]
    assert (done.stdout + done.stderr).count("`megalite launch --hostfile HOSTFILE CONFIG.yaml` does") == 1


def test_ranks_that_are_told_the_master_by_its_name(debian: Cluster, config: dict[str, Any], tmp_path: Path) -> None:
    """On node1 itself this name is loopback. Nobody says that there are several hosts."""
    path = write_config(tmp_path / "c.yaml", config)
    own = without_ranks() | ENVIRONMENT | {"WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29511"}
    ranks = [
        debian.hosts[host].popen(
            [sys.executable, "-m", "launch.train", path],
            cwd=ROOT,
            env=own | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate(("node1", "node2"))
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert len(metrics(config["run_dir"])) == config["training"]["steps"]
    assert os.linesep.join(said).count("megalite launch") == 0


def test_tasks_of_srun_are_ranks_and_a_shell_of_slurm_s_starts_its_own(config: dict[str, Any], tmp_path: Path) -> None:
    if reason := why_no_hosts(*PROGRAMS_NEEDED):
        pytest.skip(reason)
    path, rank = write_config(tmp_path / "c.yaml", config), [sys.executable, "-m", "launch.train"]
    command = [sys.executable, "-m", "launch", "train"]
    cases = {
        "two hosts": ["srun", "-N2", "-n2", *rank],
        "two hosts, the command": ["srun", "-N2", "-n2", *command],
        "one task": ["srun", "-n1", *command],
        "an allocation": ["salloc", "-N2", "-n2", *command],
    }
    with SlurmCluster(2) as slurm:
        for name, words in cases.items():
            run_dir = tmp_path / name
            said = slurm.run(*words, path, f"run_dir={run_dir}", **ENVIRONMENT)
            assert len(metrics(run_dir)) == config["training"]["steps"], name
            assert ("megalite: starting 2 ranks" in said) == (not name.startswith("two")), name
