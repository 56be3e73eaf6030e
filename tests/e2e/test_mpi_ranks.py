"""Real runs that `mpirun` starts, without a word about ranks from anybody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_config
from tests.helpers.commands import ROOT, metrics
from tests.unit.launch.runtime.test_rank_environment import without_ranks

pytestmark = pytest.mark.slow


RANK, COMMAND = ["-m", "launch.train"], ["-m", "launch", "train"]


@pytest.mark.parametrize(
    ("program", "started"),
    [
        ("mpirun.openmpi", RANK),
        ("mpirun.mpich", COMMAND),
        pytest.param("mpirun.openmpi", COMMAND, marks=pytest.mark.exhaustive),
        pytest.param("mpirun.mpich", RANK, marks=pytest.mark.exhaustive),
    ],
)
def test_mpirun_s_processes_are_ranks(tiny: dict[str, Any], tmp_path: Path, program: str, started: list[str]) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    config = write_config(tmp_path / "c.yaml", tiny | {"parallel": {"pipeline_parallel_size": 2}})
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    own |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    done = subprocess.run(
        [program, "-n", "2", sys.executable, *started, str(config)],
        cwd=ROOT,
        env=without_ranks() | own,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(metrics(tiny["run_dir"])) == tiny["training"]["steps"]
    assert f"{os.linesep}megalite: starting" not in done.stdout, "each process is one rank, and starts none"
