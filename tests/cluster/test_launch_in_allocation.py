"""`megalite launch --launcher slurm` inside an allocation of a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_config
from tests.e2e.conftest import References
from tests.helpers.audit import audit
from tests.helpers.cluster_machine import why_no_hosts
from tests.helpers.slurm_cluster import PROGRAMS_NEEDED, SlurmCluster

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
def test_srun_starts_the_same_run(tiny: dict[str, Any], references: References, tmp_path: Path) -> None:
    if reason := why_no_hosts(*PROGRAMS_NEEDED):
        pytest.skip(reason)
    tiny["parallel"] = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    tiny["training"] |= {"global_batch_size": 8}
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    path = write_config(tmp_path / "config.yaml", tiny)
    launch = [sys.executable, "-m", "launch", "launch", "--hostfile", tmp_path / "hosts", "--launcher", "slurm", path]
    with SlurmCluster(2) as slurm:
        slurm.run("salloc", "-N2", "--ntasks-per-node=2", *launch, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        slurm.cluster.assert_no_orphans("MEGALITE_ATTEMPT", within_s=2)
    records, wanted = audit(Path(tiny["run_dir"]), 4, 8), audit(references.of(tiny, world_size=4).run_dir, 4, 8)
    assert [record["loss"] for record in records] == [record["loss"] for record in wanted]
