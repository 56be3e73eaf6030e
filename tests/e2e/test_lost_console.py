"""Real ranks whose console is gone, as when ssh has died: they train on, and save when they are asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.errors import PREEMPTED_CODE
from launch.runtime.local_ranks import free_port
from tests.conftest import write_config
from tests.helpers.audit import complete, events, steps_done
from tests.helpers.commands import ROOT

pytestmark = pytest.mark.slow

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "PET_", "OMPI_", "PMI", "CROSS_", "MEGALITE_")


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages that save at the end only, and do not come there by themselves."""
    tiny["training"]["steps"] = 100_000
    return tiny | {
        "parallel": {"pipeline_parallel_size": 2},
        "monitor": {"plot": False, "report": False, "log_interval": 1},
    }


@contextmanager
def ranks_of(folder: Path, config: dict[str, Any], **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, each with pipes of its own to read from; C++ talks there too."""
    path = write_config(folder / "c.yaml", config)
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    own |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "INFO", "WORLD_SIZE": "2"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | environment
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "launch.train", str(path)],
            cwd=ROOT,
            env=own | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def lose_console(ranks: list[subprocess.Popen[str]]) -> str:
    """Reads until rank 0 trains, then no more; what rank 0 said."""
    said = ""
    assert ranks[0].stdout is not None
    while "step 2/" not in said:
        line = ranks[0].stdout.readline()
        assert line, f"ended\n{said}{ranks[0].stderr.read() if ranks[0].stderr else ''}"
        said += line
    for rank in ranks:
        assert rank.stdout is not None and rank.stderr is not None
        rank.stdout.close()
        rank.stderr.close()
    return said


def test_a_lost_console_costs_no_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    run_dir = Path(config["run_dir"])
    with ranks_of(tmp_path, config) as ranks:
        assert "megalite launch" not in lose_console(ranks)
        goal = steps_done(run_dir) + 20
        deadline = time.monotonic() + 60
        while steps_done(run_dir) < goal:
            assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline
            time.sleep(0.05)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        assert [rank.wait(timeout=60) for rank in ranks] == [PREEMPTED_CODE] * 2
    assert complete(run_dir / "checkpoints") == {steps_done(run_dir)}
    assert len(events(run_dir, "preempted")) == 1
    kept = (run_dir / "console_rank_0.log").read_text()
    assert (
        f"step {goal}/100000" in kept
        and "megalite: warning: preempted: signal SIGTERM" in kept
        and "Traceback" not in kept
    )


def test_on_several_hosts_deepspeed_s_ranks_end_saved_when_nobody_is_left(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Its ssh was what rank 0 wrote to; when that is killed, nothing else would ever end the ranks there."""
    run_dir = Path(config["run_dir"])
    with ranks_of(tmp_path, config, CROSS_SIZE="2", GLOO_SOCKET_IFNAME="lo") as ranks:
        said = lose_console(ranks)
        assert said.count("nobody checks the hosts") == said.count("`megalite launch --hostfile") == 1
        assert [rank.wait(timeout=60) for rank in ranks] == [PREEMPTED_CODE] * 2
    assert complete(run_dir / "checkpoints") == {steps_done(run_dir)}
    assert len(events(run_dir, "preempted")) == 1
