"""What can be wrong with hosts is said in a sentence, before a rank starts; and every launcher starts the same run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.runtime.run_lock import is_locked
from tests.conftest import write_config
from tests.e2e.conftest import References
from tests.helpers.audit import audit
from tests.helpers.canaries import loaded_from, plant
from tests.helpers.cluster_runs import MARK, Launched
from tests.helpers.commands import ROOT
from tests.helpers.hosts import Cluster
from tests.helpers.process_table import environment

SECRET = "not-for-everybody"
SECRETS = (
    "WANDB_API_KEY HF_PAT AWS_SESSION AZURE_CONN MLFLOW_X NCCL_X UCX_X PYTHON_X MV2_X GLOO_X TORCH_X OMP_X CUDA_X DS_X "
    "HTTPS_PROXY GOOGLE_X S3_X MEGALITE_X"
)
TWO = "node1 slots=2\nnode2 slots=2\n"


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    tiny["parallel"] = {"pipeline_parallel_size": 2}
    tiny["training"]["global_batch_size"] = 12
    return tiny


def refused(cluster: Cluster, folder: Path, config: dict[str, Any], hosts: str, *options: str) -> str:
    """The sentence with which a launch is refused; nothing may have been started."""
    (folder / "hosts").write_text(hosts)
    path = write_config(folder / "config.yaml", config)
    command = [sys.executable, "-m", "launch", "launch", "--hostfile", folder / "hosts", *options, path]
    began = time.monotonic()
    done = cluster.hosts["head"].run(command, cwd=ROOT, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    print(f"{time.monotonic() - began:.1f} s", *options)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (Path(config["run_dir"]) / "events.jsonl").exists()
    cluster.assert_no_orphans(MARK)
    (sentence,) = (line for line in done.stderr.splitlines() if line.startswith("megalite: error: "))
    return sentence.removeprefix("megalite: error: ")


def test_mistakes_that_need_no_host(two_hosts: Cluster, config: dict[str, Any], tmp_path: Path) -> None:
    def say(hosts: str, *options: str) -> str:
        return refused(two_hosts, tmp_path, config, hosts, *options)

    assert say("node1 slots=two\n").endswith(
        "hosts:1:7: 'slots=two' is not slots=NUMBER, as in `node1 slots=8`: correct the hostfile"
    )
    assert "--exclude node1@node2 leaves no host" in say(TWO, "--exclude", "node1@node2")
    assert "--spares 2 leaves none of the 2 hosts" in say(TWO, "--spares", "2")
    assert "--launcher slurm works inside an allocation" in say(TWO, "--launcher", "slurm")
    config["parallel"]["data_parallel_size"] = 3
    assert "the layout needs 6 ranks, more than the 4 slots on 2 hosts" in say(TWO)
    config["parallel"]["data_parallel_size"] = "auto"
    assert "the layout needs 2 ranks, more than the 1 slot on 1 host:" in say("node1 slots=1\n")
    config["checkpoint"] = {"resume": False}
    assert "checkpoint.resume is false" in say(TWO)


def test_hosts_that_are_not_fit(cluster_of: Callable[..., Cluster], config: dict[str, Any], tmp_path: Path) -> None:
    cluster = cluster_of(3, off=["node3"])

    def say(hosts: str, *options: str) -> str:
        return refused(cluster, tmp_path, config, hosts, *options)

    assert "host nowhere cannot be reached (ssh: Could not resolve hostname" in say(TWO + "nowhere slots=2\n")
    assert "host node1 cannot be reached" in say(TWO, "--ssh-port", "2222")
    asleep = say("node3 slots=2\nnode1 slots=2\n")
    assert "host node3 cannot be reached" in asleep and "look whether it is up" in asleep
    assert "launch.interface is ib7, and node1 has no address on one of this name: it has lo, eth0" in say(
        TWO, "--interface", "ib7"
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    cluster.private_directory("node2", run_dir)
    assert "(node2: does not see in" in say(TWO)


@pytest.fixture
def mpich(tmp_path: Path) -> Iterator[str]:
    """A PATH on which mpirun is MPICH's; Debian's default is Open MPI's."""
    folder = tmp_path / "mpich"
    folder.mkdir()
    (folder / "mpirun").symlink_to("/usr/bin/mpirun.mpich")
    (folder / "hydra_pmi_proxy").symlink_to("/usr/bin/hydra_pmi_proxy")
    yield f"{folder}:{os.environ['PATH']}"


def set_secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sets a secret in variables of all kinds that ranks get; returns their names."""
    for name in SECRETS.split():
        monkeypatch.setenv(name, SECRET)
    return SECRETS.split()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_other_launchers_start_the_same_run(
    launcher: str,
    mpich: str,
    two_hosts: Cluster,
    config: dict[str, Any],
    references: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also from a folder whose modules nobody may load, and without a secret on a command line."""
    config["training"] |= {"global_batch_size": 8}
    if launcher == "mpich":
        monkeypatch.setenv("PATH", mpich)
    set_secrets(monkeypatch)
    download = plant(tmp_path / "download")
    run = Launched(two_hosts, tmp_path / "launch", config, TWO, "--launcher", launcher, cwd=download)
    run.wait_until(lambda: len(run.command_lines_with("launch/train.py")) > 4)  # the launcher's own among them
    assert run.command_lines_with(SECRET) == []
    assert run.end() == 0, run.said()
    assert loaded_from(download) == []
    records, wanted = audit(run.run_dir, 4, 8), audit(references.of(config, world_size=4).run_dir, 4, 8)
    assert [record["loss"] for record in records] == [record["loss"] for record in wanted]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_filter_that_leaves_one_host_runs_there_and_names_that_lead_to_loopback_do_not_matter(
    cluster_of: Callable[..., Cluster], config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `deepspeed` runs here instead, and hangs. No secret is on a command line or on shared storage, and rank 0
    waits for the others on the interface that is named, alone."""
    cluster = cluster_of(2, debian_hosts=True)
    config["training"] |= {"global_batch_size": 8, "steps": 3}
    run = Launched(cluster, tmp_path / "one", config, TWO, "--include", "node2")
    assert run.end() == 0, run.said()
    assert list(run.attempts()[0]["hosts"]) == ["node2"]

    config["training"]["steps"] = 100
    names, download = set_secrets(monkeypatch), plant(tmp_path / "download")
    (download / ".deepspeed_env").write_text("LD_PRELOAD=theirs.so\n")
    (tmp_path / "own").write_text(f"OF_A_FILE={SECRET}\n")
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "own"))
    run = Launched(cluster, tmp_path / "two", config, TWO, "--interface", "eth0", cwd=download)
    run.wait_until(lambda: len(run.rank_processes()) == 4)
    port = environment(run.rank_processes()[0].pid)["MASTER_PORT"]
    assert run.command_lines_with(SECRET) == []
    files = [path for path in run.run_dir.rglob("*") if path.is_file()]
    assert any(path.name == "environment" for path in files)
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    assert not any(b"MEGALITE_ATTEMPT_SECRET" in path.read_bytes() for path in files)
    for node in ("node1", "node2"):
        private = cluster.hosts[node].run(["sh", "-c", "cat /dev/shm/megalite_*.json"], check=True).stdout
        assert {*names, "OF_A_FILE"} <= {name for name, value in yaml.safe_load(private).items() if value == SECRET}
    run.wait_until(lambda: is_locked(run.run_dir) is True)
    second = [sys.executable, "-m", "launch", "launch", "--hostfile", run.folder / "hosts", run.folder / "config.yaml"]
    done = cluster.hosts["head"].run(second, cwd=ROOT, env=os.environ | {"DS_ACCELERATOR": "cpu"})
    holder = re.search(r"another run is using run_dir .* \(process \d+ on node1 has its lock\): wait", done.stderr)
    assert done.returncode == 2 and holder is not None and done.stderr.count("\n") == 1, done.stderr
    run.wait_for_steps(1)
    node1 = cluster.hosts["node1"]
    listeners = node1.run(["ss", "-ltnH", f"sport = :{port}"], check=True).stdout.split()
    assert f"{node1.ip}:{port}" in listeners and not {f"*:{port}", f"0.0.0.0:{port}"} & set(listeners), listeners
    assert run.end() == 0, run.said()
    assert "./.deepspeed_env is not read" in run.said() and loaded_from(download) == []
    assert run.attempts()[-1]["hosts"] == {"node1": 2, "node2": 2}
    audit(run.run_dir, 100, 8)


def test_a_dry_run_connects_to_nobody(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("nowhere slots=2\nnobody slots=2\nspare slots=2\n")
    path = write_config(tmp_path / "config.yaml", config)
    words = [sys.executable, "-m", "launch", "launch", "--hostfile", tmp_path / "hosts", "--spares", "1", "--dry-run"]
    done = subprocess.run([*words, path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "nowhere: ranks 0 to 1 on devices 0, 1" in done.stdout and "spare: spare" in done.stdout
    told = yaml.safe_load(
        subprocess.run([*words, "--json", path], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    assert told["hosts"] == {"nowhere": [0, 1], "nobody": [0, 1]} and told["ranks"] == 4
