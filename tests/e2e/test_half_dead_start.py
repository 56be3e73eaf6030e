"""A rank that dies while the run starts takes the others along, whoever has started them: here nobody watches them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.runtime.local_ranks import free_port
from tests.conftest import write_config
from tests.helpers.commands import ROOT
from tests.unit.launch.runtime.test_rank_environment import without_ranks

pytestmark = pytest.mark.slow

DIES = """
import os, sys

class Dies:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "launch.train" in sys.orig_argv:
            os.kill(os.getpid(), 9)

sys.meta_path.insert(0, Dies())
"""


def test_a_rank_that_is_killed_before_the_ranks_meet_ends_the_others(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 leaves no word, and no store at which the other one could read it; that waited for half an hour."""
    path = write_config(tmp_path / "c.yaml", tiny | {"parallel": {"pipeline_parallel_size": 2}})
    (tmp_path / "killer").mkdir()
    (tmp_path / "killer" / "sitecustomize.py").write_text(DIES)
    own = without_ranks() | {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    own |= {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "launch.train", path],
            cwd=ROOT,
            env=own | {"RANK": str(rank)} | ({} if rank else {"PYTHONPATH": str(tmp_path / "killer")}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-9, 1], said
    assert said[1].count("megalite: error: rank 0 on ") == 1 and "its process was ended, by a signal" in said[1], said
