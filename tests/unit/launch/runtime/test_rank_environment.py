"""Every launcher's environment gives the same rank, as the launchers were seen to write it; what does not go together
is one sentence."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.runtime.rank_environment import (
    PRIVATE,
    Rank,
    is_rank,
    read_rank,
    set_rank_variables,
    take_private_environment,
)
from launch.runtime.slurm_rendezvous import first_host
from tests.helpers.commands import ROOT

MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
# what srun 22.05 gives the task 2 of `srun -N2 -n3 --ntasks-per-node=2` in job 7, without what does not matter
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[01-04]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[02-03]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
}
ONE_TASK = STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
IN_STEP = ("node02", 10_000 + 16 * 7 + 1)
# the shell of `salloc -N2 -n4`, on the host where salloc was called, and in an interactive step on the first node
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
INTERACTIVE = {**STEP, "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}
BATCH = {name: value for name, value in STEP.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
OMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "1550843905",
    "PMIX_RANK": "3",
}
HYDRA = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}
POD = {
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
}
TRIO = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
DEEPSPEED = TRIO | MEETING | {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"}
TORCHRUN = TRIO | MEETING | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

FOUND = {
    "deepspeed": (DEEPSPEED, Rank(3, 1, 4, "deepspeed", True, ("node1", 4000))),
    "deepspeed on one host": (DEEPSPEED | {"CROSS_SIZE": "1"}, Rank(3, 1, 4, "deepspeed", False, ("node1", 4000))),
    "torchrun": (TORCHRUN, Rank(3, 1, 4, "torchrun", True, ("node1", 4000))),
    "torchrun in a step of one task a node": (TORCHRUN | STEP, Rank(3, 1, 4, "torchrun", True, ("node1", 4000))),
    "torchrun in a pod": (
        TORCHRUN | POD | {"PET_NPROC_PER_NODE": "2"},
        Rank(3, 1, 4, "torchrun", True, ("node1", 4000)),
    ),
    "deepspeed's helper under mpich": (
        TRIO | MEETING | HYDRA | {"LOCAL_SIZE": "2"},
        Rank(3, 1, 4, "", True, ("node1", 4000)),
    ),
    "somebody's script": (TRIO | MEETING, Rank(3, 1, 4, "", None, ("node1", 4000))),
    "a script that maps Slurm's ranks": (
        STEP | {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3"},
        Rank(2, 0, 3, "", None, IN_STEP),
    ),
    "ranks of one host that are told no master": (
        TRIO | {"LOCAL_WORLD_SIZE": "4"},
        Rank(3, 1, 4, "", False, ("127.0.0.1", 29500)),
    ),
    "srun": (STEP, Rank(2, 0, 3, "Slurm", True, IN_STEP)),
    "srun --mpi=pmi2": (STEP | {"PMI_RANK": "2", "PMI_SIZE": "3"}, Rank(2, 0, 3, "Slurm", True, IN_STEP)),
    "srun --mpi=pmix": (STEP | {"PMIX_RANK": "2"}, Rank(2, 0, 3, "Slurm", True, IN_STEP)),
    "srun on one node": (
        STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node02"},
        Rank(2, 0, 3, "Slurm", False, ("127.0.0.1", IN_STEP[1])),
    ),
    "srun, a script sets what it knows": (
        STEP | MEETING | {"WORLD_SIZE": "3"},
        Rank(2, 0, 3, "Slurm", True, ("node1", 4000)),
    ),
    "srun in any order, with a master": (
        STEP | MEETING | {"SLURM_DISTRIBUTION": "arbitrary"},
        Rank(2, 0, 3, "Slurm", True, ("node1", 4000)),
    ),
    "srun --gpus-per-task=1": (
        STEP | {"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "3"},
        Rank(2, 0, 3, "Slurm", True, IN_STEP),
    ),
    "srun, all GPUs visible": (
        STEP | {"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        Rank(2, 3, 3, "Slurm", True, IN_STEP),
    ),
    "mpirun of Open MPI on one host": (
        OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
        Rank(3, 1, 4, "Open MPI", False, ("127.0.0.1", 11_930)),
    ),
    "mpirun of Open MPI": (OMPI | MEETING, Rank(3, 1, 4, "Open MPI", True, ("node1", 4000))),
    "mpirun in a batch script": (OMPI | MEETING | BATCH, Rank(3, 1, 4, "Open MPI", True, ("node1", 4000))),
    "mpirun on a node that Slurm started its daemon on": (
        OMPI | MEETING | ONE_TASK,
        Rank(3, 1, 4, "Open MPI", True, ("node1", 4000)),
    ),
    "mpirun of MPICH on one host": (
        HYDRA | {"MPI_LOCALNRANKS": "4"},
        Rank(3, 1, 4, "MPI", False, ("127.0.0.1", 29500)),
    ),
    "mpirun of MPICH in a shell of srun's": (HYDRA | MEETING | ONE_TASK, Rank(3, 1, 4, "MPI", True, ("node1", 4000))),
    "PMIx, with what it does not say": (
        MEETING | {"PMIX_RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
        Rank(3, 1, 4, "PMIx", None, ("node1", 4000)),
    ),
    "a pod with one process": (POD, Rank(1, 0, 2, "Kubeflow", True, ("run-node-0-0.run", 29400))),
    "a pod of a PyTorchJob": (
        POD | MEETING | {"RANK": "1", "WORLD_SIZE": "2"},
        Rank(1, 0, 2, "Kubeflow", True, ("node1", 4000)),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_launcher_s_rank(name: str) -> None:
    environment, expected = FOUND[name]
    assert read_rank(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [{}, SALLOC, INTERACTIVE, BATCH, POD | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, MEETING],
    ids=["a shell", "salloc", "an interactive step", "a batch script", "the only pod, for several", "only a master"],
)
def test_no_launcher_started_this(environment: dict[str, str]) -> None:
    """`megalite train` starts local ranks there; in an interactive step SLURM_PROCID is 0, SLURM_NTASKS the job's."""
    assert read_rank(environment) is None


@pytest.mark.parametrize(
    "environment", [ONE_TASK, POD | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}], ids=["srun -n1", "the only pod"]
)
def test_a_scheduler_s_only_task_is_a_rank_or_a_shell(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun -n1 megalite train` starts as many ranks as the config wants, `srun -n1 python -m launch.train` is one."""
    rank = read_rank(environment)
    assert rank is not None and (rank.rank, rank.world_size, rank.is_alone) == (0, 1, True)
    with monkeypatch.context() as patch:
        _set(patch, environment)
        assert not is_rank() and "RANK" not in os.environ
        assert set_rank_variables() == rank and os.environ["WORLD_SIZE"] == "1"
        assert is_rank(), "as deepspeed and torchrun set it"


WRONG = {
    "half": ({"RANK": "3"}, "the environment has RANK but not LOCAL_RANK and WORLD_SIZE: set all three"),
    "two": ({"RANK": "1", "WORLD_SIZE": "2"}, "the environment has RANK and WORLD_SIZE but not LOCAL_RANK: set"),
    "no number": (TRIO | {"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one', not a whole number: unset it"),
    "negative": (TRIO | {"RANK": "-1"}, "RANK is '-1', not a whole number"),
    "too high": (TRIO | MEETING | {"RANK": "4"}, "this is rank 4 of 4, from 0: correct it"),
    "port": (TRIO | MEETING | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a whole number"),
    "no port": (TRIO | MEETING | {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536, which is no port"),
    "outside its host": (
        TRIO | MEETING | {"LOCAL_WORLD_SIZE": "1"},
        "LOCAL_RANK is 1, LOCAL_WORLD_SIZE 1 and WORLD_SIZE 4",
    ),
    "more on a host than at all": (
        TRIO | MEETING | {"LOCAL_SIZE": "8"},
        "LOCAL_SIZE 8 and WORLD_SIZE 4, which do not go",
    ),
    "left over in a step": (
        STEP | MEETING | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        "Slurm has started 3 ranks, and WORLD_SIZE is 1: unset RANK, LOCAL_RANK and WORLD_SIZE",
    ),
    "left over under Open MPI": (
        OMPI | MEETING | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        "Open MPI has started 4 ranks, and WORLD_SIZE is 2: unset RANK",
    ),
    "no master": (TRIO, "set MASTER_ADDR to the host of rank 0"),
    "no master of MPI's": (OMPI, "set MASTER_ADDR to the host of rank 0"),
    "any order": (STEP | {"SLURM_DISTRIBUTION": "arbitrary"}, "set MASTER_ADDR to the host of rank 0"),
    "another world": (
        STEP | {"WORLD_SIZE": "8"},
        "WORLD_SIZE is 8, but Slurm has started this process as rank 2 of 3: unset WORLD_SIZE, or start as many",
    ),
    "another rank": (OMPI | {"RANK": "0"}, "RANK is 0, but Open MPI has started this process as rank 3 of 4"),
    "half of Open MPI": ({"OMPI_COMM_WORLD_RANK": "0"}, "Open MPI has set OMPI_COMM_WORLD_RANK but not OMPI_COMM"),
    "half of PMI": (
        {"PMI_RANK": "0"},
        "MPI has set PMI_RANK but not PMI_SIZE: set .*, or unset PMI_RANK if no launcher",
    ),
    "no local rank": (
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        "nothing says which one of its host: set LOCAL_RANK, or unset PMI_RANK if no",
    ),
    "PMIx alone": ({"PMIX_RANK": "0"}, "but not of how many: set LOCAL_RANK and WORLD_SIZE too, or unset"),
    "several in a pod": (POD | {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE 8: let the pod's command be torchrun"),
    "elastic": (POD | {"PET_NNODES": "1:4"}, "PET_NNODES is 1:4 and PET_NPROC_PER_NODE 1: let"),
    "no node": (STEP | {"SLURM_STEP_NODELIST": "[1-2"}, "nothing says where the ranks meet: set MASTER_ADDR"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together_is_one_sentence(name: str) -> None:
    environment, sentence = WRONG[name]
    with pytest.raises(LaunchError, match=sentence) as caught:
        read_rank(environment)
    assert "\n" not in str(caught.value)


def test_a_lone_rank_that_is_told_no_master_meets_itself() -> None:
    rank = read_rank({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    assert rank is not None
    with socket.socket() as probe:
        probe.bind(rank.master)


def test_torch_and_deepspeed_find_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, STEP | {"MASTER_PORT": "4711"})
    set_rank_variables()
    found = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    expected = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "node02", "MASTER_PORT": "4711"}
    assert found == expected
    assert set_rank_variables() == Rank(2, 0, 3, "", None, ("node02", 4711)), "asked again, it is the same"


def test_steps_of_a_job_and_jobs_of_a_host_meet_at_other_ports() -> None:
    ports = set()
    for job in range(100, 200):
        for step in range(3):
            rank = read_rank(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            assert rank is not None and 1024 < rank.master[1] < 32_768
            ports.add(rank.master[1])
    assert len(ports) == 300


LISTS = {
    "node1": "node1",
    "node1,node2": "node1",
    "node[1-3,7]": "node1",
    "node[07-12,15],other": "node07",
    "node[3]": "node3",
    "gpu-[5,7-9]-[2-3]": "gpu-5-2",
    "rack[1-2]n[03,5-6]-ib,x[1-9]": "rack1n03-ib",
    "a-b.c_d,z": "a-b.c_d",
    "n[0998-1002]": "n0998",
}


@pytest.mark.parametrize("nodelist", LISTS)
def test_the_first_host_of_slurm_s_list(nodelist: str) -> None:
    assert first_host(nodelist) == LISTS[nodelist]
    if shutil.which("scontrol") is not None:  # Slurm's own reading, where it is installed
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=False
        )
        assert answer.returncode != 0 or answer.stdout.split()[0] == LISTS[nodelist]


@pytest.mark.parametrize("nodelist", ["", "[1-2", "(null)", ",a", "[a-b]"])
def test_what_is_no_list_names_no_host(nodelist: str) -> None:
    assert first_host(nodelist) == ""


def test_private_variables_come_from_a_file_and_override_the_host_s(tmp_path: Path) -> None:
    path = tmp_path / "private.json"
    path.write_text(json.dumps({"WANDB_API_KEY": "secret", "AWS_REGION": "there"}))
    path.chmod(0o600)
    environment = {PRIVATE: str(path), "AWS_REGION": "here"}
    take_private_environment(environment)
    assert environment == {PRIVATE: str(path), "AWS_REGION": "there", "WANDB_API_KEY": "secret"}
    untouched = {"A": "b"}
    take_private_environment(untouched)
    assert untouched == {"A": "b"}


@pytest.mark.parametrize(
    "content", [None, "{", "[1]", '{"A": 3}', "\x80"], ids=["missing", "broken", "a list", "a number", "not UTF-8"]
)
def test_private_variables_that_cannot_be_read_are_one_sentence(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "private.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
        path.chmod(0o600)
    with pytest.raises(LaunchError, match=rf"{PRIVATE} names {path}, which cannot be read \(.*shared by all hosts"):
        take_private_environment({PRIVATE: str(path)})


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("readable", "has mode 644, so others may read or write it: chmod 600 "),
        ("writable", "has mode 622, so others"),
        ("another's", r"belongs to user \S+, not to you: "),
        ("link", "is a symbolic link, where "),
        ("pipe", "is a named pipe, where "),
        ("huge", r"has more than 16,777,216 bytes"),
    ],
)
def test_a_file_that_others_could_have_written_sets_nothing(tmp_path: Path, what: str, sentence: str) -> None:
    """Else whoever writes it runs code in each rank, by LD_PRELOAD or PYTHONPATH."""
    path, environment = tmp_path / "private.json", {PRIVATE: str(tmp_path / "private.json")}
    if what == "pipe":
        os.mkfifo(path, 0o600)
    elif what == "link":
        (tmp_path / "own").write_text("{}")
        path.symlink_to(tmp_path / "own")
    else:
        path.write_text('{"LD_PRELOAD": "/evil.so"}')
        path.chmod({"readable": 0o644, "writable": 0o622}.get(what, 0o600))
    if what == "huge":
        os.truncate(path, 1 << 30)
    if what == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(path, 65534, 65534)
    with pytest.raises(LaunchError, match=f"^{PRIVATE} must name a file of your own .*: {path} {sentence}"):
        take_private_environment(environment)
    assert environment == {PRIVATE: str(path)}


def test_the_rank_s_own_words(tmp_path: Path) -> None:
    """Whole processes: the sentence and the exit code of a user's mistake."""
    for extra, said in (
        ({"RANK": "0"}, "the environment has RANK but not LOCAL_RANK and WORLD_SIZE"),
        (INTERACTIVE, "launch.train is one rank of a run: start it with"),
        (TRIO | {"MASTER_ADDR": "127.0.0.1", PRIVATE: str(tmp_path / "none")}, f"{PRIVATE} names "),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "launch.train", "c.yaml"],
            cwd=ROOT,
            env=without_ranks() | extra,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"megalite: error: {said}"), done.stderr


def without_ranks() -> dict[str, str]:
    """This process's environment, should a launcher have started the tests."""
    names = (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "PET_", "OMPI_"),
        *("PMI", "CROSS_", "LOCAL_", "GROUP_"),
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def _set(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Only `environment` says anything about ranks; all is as before when the test has ended."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    for name in os.environ.keys() - without_ranks().keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
