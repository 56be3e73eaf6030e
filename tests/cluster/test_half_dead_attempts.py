"""What one host meets alone before the run has started ends the attempt on all hosts, with that host's message."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_ranks import ENVIRONMENT
from tests.conftest import write_config
from tests.helpers.cluster_runs import Launched
from tests.helpers.commands import BIN, ROOT
from tests.helpers.hosts import Cluster
from tests.unit.launch.runtime.test_rank_environment import without_ranks

pytestmark = pytest.mark.slow

HOSTS = "node1 slots=1\nnode2 slots=1\nnode3 slots=1\n"
SECONDS = 120.0  # on a busy machine, of which most is three starts; without the message a host waits for half an hour
KEEPS_LOCK = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from launch.runtime.run_lock import take_lock
lock = take_lock(Path(sys.argv[2]), 100)  # as soon as rank 0 has ended
time.sleep(1000)
"""


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """A stage on each of three hosts."""
    return tiny | {"parallel": {"pipeline_parallel_size": 3}, "monitor": {"plot": False, "report": False}}


@pytest.mark.timeout(300)
def test_a_launch_ends_with_the_message_of_the_host_that_fails(
    config: dict[str, Any], cluster_of: Callable[..., Cluster], tmp_path: Path
) -> None:
    """A rank killed on the last host is tried again, where a process of a frozen host may still have the lock; what
    only the middle host lacks is a mistake, and final."""
    cluster = cluster_of(3)
    run = Launched(cluster, tmp_path / "killed", config, HOSTS, "--restarts", "1")
    run.wait_until(lambda: len(run.rank_processes()) == 3)
    frozen = cluster.hosts["node2"].popen([sys.executable, "-c", KEEPS_LOCK, ROOT, run.run_dir])
    killed = run.send(signal.SIGKILL, rank=2)
    run.wait_until(lambda: "on node2, of an attempt before, still has the lock" in run.said())
    frozen.kill()  # ranks wait for the lock
    assert run.end() == 0, run.said()
    first, second = run.attempts()
    assert first["ended"] - killed < SECONDS and first["exit_code"] == 128 + signal.SIGKILL, run.said()
    told = "rank 2 on node3: its process was ended" in run.said() or "left on node3" in first["reason"]
    assert told and second["exit_code"] == 0, "killed before its first line, it has no witness, and the launcher tells"

    config["run_dir"] = str(tmp_path / "again")
    run = Launched(cluster, tmp_path / "lacking", config, HOSTS, "--restarts", "1")
    run.wait_until(lambda: len(run.rank_processes()) == 3)
    cluster.private_directory("node2", Path(config["data"]["path"]).parent)  # after the checks of hosts
    assert run.end() == 2, run.said()
    (only,) = run.attempts()
    lacking = f"token file {config['data']['path']}.bin does not exist"
    assert only["ended"] - only["began"] < SECONDS and run.said().count(lacking) == 3, run.said()


@pytest.mark.timeout(300)
def test_deepspeed_alone_ends_with_the_message_of_the_host_that_fails(
    config: dict[str, Any], cluster_of: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Rank 0, for which all others would wait, does not find the data."""
    cluster = cluster_of(3)
    (tmp_path / "hosts").write_text(HOSTS)
    path = write_config(tmp_path / "c.yaml", config)
    (tmp_path / "environment").write_text("".join(f"{name}={value}\n" for name, value in ENVIRONMENT.items()))
    words = [BIN / "deepspeed", "--hostfile", tmp_path / "hosts", "--master_addr", cluster.hosts["node1"].ip]
    cluster.private_directory("node1", Path(config["data"]["path"]).parent)
    began = time.monotonic()
    done = cluster.hosts["head"].run(
        [*words, ROOT / "launch" / "train.py", path],
        cwd=ROOT,
        timeout=240,
        env=without_ranks() | ENVIRONMENT | {"DS_ENV_FILE": str(tmp_path / "environment")},
    )
    said = done.stdout + done.stderr
    assert time.monotonic() - began < SECONDS and done.returncode == 2, said
    assert said.count("megalite: error: rank 0 on node1: token file") == 2, said
