"""The script that `megalite slurm` writes, and mistakes; what Slurm makes of it: tests/cluster/test_slurm.py."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from data_pipeline.errors import DataError
from launch.cli.app import app
from launch.cli.slurm import seconds_of
from launch.conversion.huggingface.folder_lookup import SMALL_FILES
from launch.errors import USER_ERROR_CODE, USER_ERRORS, LaunchError
from megalite.checkpoint.errors import CheckpointError
from tests.conftest import write_config
from tests.helpers.canaries import loaded_from, plant

Slurm = Callable[..., str]
ON_CPU = ("-N", "2", "--gpus-per-node", "0")
ON_GPUS = ("-N", "4", "--gpus-per-node", "8")


@pytest.fixture
def slurm(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """`megalite slurm` of a config with two stages; what it prints on stdout."""
    tiny["parallel"] = {"pipeline_parallel_size": 2, "data_parallel_size": "auto"}
    tiny["training"] |= {"global_batch_size": 32}
    write_config(tmp_path / "config.yaml", tiny)
    monkeypatch.chdir(tmp_path)
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["slurm", "config.yaml", *words])
        if isinstance(done.exception, USER_ERRORS):
            raise done.exception
        assert done.exit_code == 0, done.output
        checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
        assert "--json" in words or checked.stderr == "", checked
        return done.stdout

    return run


def directives(script: str) -> dict[str, str]:
    """Option of sbatch -> its value."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert lines == [line for line in lines if not line.startswith("#")]
    return {line.partition("=")[0]: "".join(shlex.split(line.partition("=")[2])) for line in lines}


def test_a_script_says_all_that_slurm_must_know(slurm: Slurm, tmp_path: Path) -> None:
    words = ["--time", "2-12", "--partition", "h100", "--account", "lab", "--qos", "low", "--cpus-per-task", "12"]
    script = slurm(*ON_GPUS, *words, "--signal-before", "300", "--sbatch-option", "--mem=0", "training.seed=7")
    assert directives(script) == {
        "job-name": "run",
        "nodes": "4",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "cpus-per-task": "12",
        "time": "2-12",
        "partition": "h100",
        "account": "lab",
        "qos": "low",
        "chdir": str(tmp_path),
        "output": f"{tmp_path}/run/slurm-%j.log",
        "open-mode": "append",
        "signal": "USR1@300",
        "requeue": "",
        "mem": "0",
    }
    assert "--nodes=4 --ntasks=32 --ntasks-per-node=8 --cpus-per-task=12 " in script
    assert script.count("trap '' TERM USR1 USR2 HUP") == 2, "shells that die of them take saves along"
    assert "--kill-on-bad-exit=1" in script and '--distribution="$distribution"' in script
    assert "-m launch.train config.yaml training.seed=7\n" in script
    assert "tensor 1 x pipeline 2 (schedule chosen at the start) x data 16" in script
    assert 'OMP_NUM_THREADS="${OMP_NUM_THREADS:-12}"' in script
    assert "DS_ACCELERATOR" in script.partition("unset ")[2].splitlines()[0], "a shell on the CPU must not decide"
    assert (tmp_path / "run").is_dir(), "a job whose output has no folder ends without a word"


def test_ranks_on_the_cpu_need_no_gpus(slurm: Slurm) -> None:
    script = slurm(*ON_CPU)
    assert directives(script)["ntasks-per-node"] == "1" and "gpus-per-node" not in directives(script)
    assert 'DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"' in script
    assert directives(slurm(*ON_CPU, "--ntasks-per-node", "4"))["ntasks-per-node"] == "4"


def test_torchrun_starts_once_per_host_and_gets_the_cores_of_all_its_ranks(slurm: Slurm) -> None:
    script = slurm(*ON_GPUS, "--spawner", "torchrun", "--cpus-per-task", "12")
    assert directives(script)["ntasks-per-node"] == "8"
    assert "--nodes=4 --ntasks=4 --ntasks-per-node=1 --cpus-per-task=96 " in script
    assert "--nproc-per-node=8" in script and "--max-restarts=0" in script
    assert script.count("trap '' TERM USR1 USR2 HUP") == 3
    assert "--signals-to-handle=SIGINT " in script, "SIGTERM would leave its ranks 30 s for their save"


@pytest.mark.parametrize("spawner", ["srun", "torchrun"])
def test_hosts_are_placed_anew_at_each_start(slurm: Slurm, spawner: str) -> None:
    script = slurm(*ON_GPUS, "--spawner", spawner, "training.seed=7")
    assert "-m launch place config.yaml training.seed=7 " in script
    assert '--names --nodes "$SLURM_JOB_NODELIST:8" --topology /dev/stdin\n' in script
    assert script.index("trap ''") < script.index("scontrol show topology") < script.index(" supervise ")
    assert "SLURM_HOSTFILE" in script.partition("unset ")[2].splitlines()[0], "it would count more than --distribution"
    assert " place " not in slurm("-N", "1", "--gpus-per-node", "8", "--spawner", spawner), "one host has no order"


TREE = "SwitchName=a Level=0 Nodes=node[2-3]\nSwitchName=b Nodes=node1\nSwitchName=top Level=1 Switches=a,b\n"
ORDERS = {  # what Slurm and `megalite place` say, and what follows
    "placed": (
        TREE,
        "node3 node3 node1 node1 node2 node2",
        "node3 arbitrary",
        "in this order of hosts: node3 node1 node2",
    ),
    "no topology": ("No topology information available", "never asked", "unset block", "which tells no topology"),
    "place fails": (TREE, "", "unset block", "none could be found"),
    "a config of another size": (TREE, "node3 node1", "unset block", "none could be found"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_of_hosts_is_taken_whole_or_not_at_all(order: str, slurm: Slurm, tmp_path: Path) -> None:
    """The script's own lines between its first word and the supervisor, with answers as Slurm and `place` give them."""
    topology, names, result, said = ORDERS[order]
    for spawner, lines in (("srun", names.split()), ("torchrun", list(dict.fromkeys(names.split())))):
        words = ["-N", "3", "--gpus-per-node", "2", "parallel.pipeline_parallel_size=3", "--spawner", spawner]
        script = slurm(*words, "training.global_batch_size=8")
        place = script[script.index("place() {") : script.index(" -m launch supervise ")].rpartition("\n")[0]
        answers = f"""
            say() {{ echo "$*"; }}
            scontrol() {{ echo {shlex.quote(topology)}; }}
            run_dir={tmp_path} distribution=block
            {place.replace("place() {", "asked() {", 1)}
            echo "${{MASTER_ADDR:-unset}} $distribution"
        """
        answer = f"place() {{ [ -n '{names}' ] && printf '%s\\n' {names}; }}\n"
        done = subprocess.run(["bash", "-c", answer + answers], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == result and said in done.stdout, done
        if order == "placed":
            assert (tmp_path / ".task_hosts").read_text().split() == lines


def test_sites_may_have_their_own_words_for_gpus(slurm: Slurm) -> None:
    assert directives(slurm("-N", "4", "--gpus-per-node", "a100:8"))["gpus-per-node"] == "a100:8"
    found = directives(slurm(*ON_GPUS, "--sbatch-option", "--gres=gpu:a100:8", "--sbatch-option", "--exclusive"))
    assert found["gres"] == "gpu:a100:8" and "exclusive" in found and "gpus-per-node" not in found


def test_a_users_output_replaces_ours(slurm: Slurm) -> None:
    script = slurm(*ON_CPU, "--sbatch-option", "--output=/logs/%x.log")
    assert script.count("#SBATCH --output=") == 1 and directives(script)["output"] == "/logs/%x.log"


def test_names_with_odd_characters_stay_whole(slurm: Slurm, tmp_path: Path) -> None:
    odd = tmp_path / """a "b" 'c' 100% #1 $HOME"""
    script = slurm(*ON_CPU, f"run_dir={json.dumps(str(odd))}", "--job-name", "odd", "--sbatch-option", "--comment=a #b")
    assert '#SBATCH --comment="a #b"' in script
    (line,) = [line for line in script.splitlines() if line.startswith("#SBATCH --output=")]
    assert shlex.split(line.partition("=")[2]) == [f"{odd}/slurm-%j.log".replace("100%", "100%%")]
    assigned = next(line for line in script.splitlines() if line.startswith("run_dir="))
    printed = subprocess.run(["bash", "-c", f'{assigned}; echo "$run_dir"'], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == str(odd) and odd.is_dir()


def test_a_dry_run_downloads_no_weights(
    slurm: Slurm, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that has a config.json alone; without --dry-run its weights are asked for, and missed."""
    model = {name: value for name, value in tiny.pop("model").items() if name != "model_type"}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text(json.dumps({"model_type": "llama", **model}))
    tiny["training"]["initialize_from"] = "some/model"
    write_config(tmp_path / "config.yaml", tiny)
    asked: list[str] = []

    def download(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert "-m launch.train config.yaml" in slurm(*ON_CPU, "--dry-run")
    assert set(asked) == set(SMALL_FILES)
    with pytest.raises(CheckpointError):
        slurm(*ON_CPU)
    assert set(asked) > set(SMALL_FILES)


def test_a_dry_run_prints_and_writes_nothing(slurm: Slurm, tmp_path: Path) -> None:
    assert slurm(*ON_CPU, "--dry-run").startswith("#!/bin/bash\n#SBATCH ")
    assert slurm(*ON_CPU, "--dry-run", "-o", "job.sh").startswith("dry run: ")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_data_may_be_where_only_the_job_sees_it(
    slurm: Slurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A login node need not have the storage of the job's hosts; the ranks check data first thing."""
    script = slurm(*ON_CPU, "--json", "data.path=on_the_hosts/corpus")
    (notice,) = [notice for notice in json.loads(script)["notices"] if "data" in notice]
    assert f"this host has no {tmp_path}/on_the_hosts/corpus.bin" in notice and "when the job starts" in notice


def test_data_at_a_url_is_looked_up_here_and_copied_by_the_hosts_of_the_job(
    slurm: Slurm, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login node that downloads a corpus, or that takes a URL for a path and lets a wrong one wait in the queue."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = slurm(*ON_CPU, "--json", f"data.path=file://{corpus}")
    (notice,) = [notice for notice in json.loads(script)["notices"] if "data" in notice]
    assert f"this host has no copy of file://{corpus} in {tmp_path}/cache" in notice
    assert "each host of the run makes its own" in notice and not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match=r"nowhere/text\.meta\.json does not exist, without which no copy"):
        slurm(*ON_CPU, f"data.path=file://{tmp_path}/nowhere/text")


def test_a_file_is_written_once(slurm: Slurm, tmp_path: Path) -> None:
    said = slurm(*ON_CPU, "-o", "job.sh")
    assert "sbatch job.sh" in said
    with pytest.raises(LaunchError, match=r"job\.sh is there already"):
        slurm(*ON_CPU, "-o", "job.sh")
    slurm(*ON_GPUS, "-o", "job.sh", "--overwrite")
    assert directives((tmp_path / "job.sh").read_text())["nodes"] == "4"


def test_programs_read_json(slurm: Slurm, tmp_path: Path) -> None:
    facts = json.loads(slurm(*ON_GPUS, "--json"))
    assert facts["script"].startswith("#!/bin/bash\n") and facts["job"] is None and facts["ranks"] == 32
    assert facts["log"] == f"{tmp_path}/run/slurm-%j.log"
    assert any("--cpus-per-task" in notice for notice in facts["notices"])


def test_tensor_parallelism_between_hosts_is_told(slurm: Slurm) -> None:
    words = ["--gpus-per-node", "0", "--json", "parallel.tensor_parallel_size=2"]
    for nodes, is_told in (("2", False), ("4", True)):
        notices = json.loads(slurm("-N", nodes, *words))["notices"]
        assert any("tensor parallelism over 2 ranks crosses nodes of 1" in notice for notice in notices) == is_told


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("24:00:00", 24 * 3600),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 1800),
        ("1-00:00:05", 24 * 3600 + 5),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int | None) -> None:
    assert seconds_of(time) == seconds


MISTAKES = {
    "time in words": ([*ON_CPU, "--time", "4h"], ["4h", "24:00:00"]),
    "no time to train": ([*ON_CPU, "--time", "3", "--signal-before", "120"], ["--time 3", "120 s", "--signal-before"]),
    "no number of GPUs": (["-N", "2", "--gpus-per-node", "many"], ["many", "a100:8"]),
    "layout of another size": (["-N", "3", "--gpus-per-node", "1"], ["does not divide the 3 processes"]),
    "layout of another fixed size": (
        [*ON_GPUS, "parallel.data_parallel_size=2"],
        ["makes 4 processes, but this run has 32"],
    ),
    "too many hosts": (["-N", "4", "--gpus-per-node", "0"], ["2 ranks", "4 nodes", "give --nodes 2, or"]),
    "ranks without GPUs": ([*ON_GPUS, "--ntasks-per-node", "4"], ["--ntasks-per-node 4", "--gpus-per-node 8"]),
    "unknown option": ([*ON_CPU, "training.stepz=3"], ["training.stepz", "training.steps"]),
    "other data than the checkpoint's": ([*ON_CPU, "model.vocab_size=100"], ["vocab_size", "100"]),
    "may not go on": ([*ON_CPU, "checkpoint.resume=false"], ["checkpoint.resume"]),
    "two words": ([*ON_CPU, "--partition", "a b"], ["--partition", "'a b'"]),
    "no option of sbatch's": ([*ON_CPU, "--sbatch-option", "mem=0"], ["'mem=0'", "--key=value"]),
    "secret": ([*ON_CPU, "--sbatch-option", "--comment=password=hunter2"], ["--comment holds a password", "export it"]),
    "two lines": ([*ON_CPU, "--sbatch-option", "--comment=a\nb"], ["--key=value"]),
    "option that is ours": ([*ON_CPU, "--sbatch-option", "--time=3"], ["--time=3", "give --time"]),
    "number of nodes as an option": ([*ON_CPU, "--sbatch-option", "--nodes=3"], ["give -N"]),
    "folder as the file": ([*ON_CPU, "-o", "/etc", "--overwrite"], ["/etc is a folder: name a file"]),
    "file in no folder": ([*ON_CPU, "-o", "nowhere/job.sh"], ["there is no folder", "/nowhere;"]),
    "file in a file": ([*ON_CPU, "-o", "config.yaml/job.sh"], ["/config.yaml is a file;"]),
    "run_dir in a file": ([*ON_CPU, "run_dir=config.yaml/x"], ["/config.yaml is a file: choose another run_dir"]),
    "no sbatch": ([*ON_CPU, "--submit"], ["no sbatch on PATH"]),
    "run_dir is a file": ([*ON_CPU, "run_dir=config.yaml"], ["config.yaml"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    mistake: str, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, fragments = MISTAKES[mistake]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(USER_ERRORS) as told:
        slurm(*words)
    assert "\n" not in str(told.value) and all(part in str(told.value) for part in fragments), told.value
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_job_that_sbatch_refuses_leaves_nothing(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such account' >&2\nexit 1\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LaunchError, match="sbatch does not take the job: no such account"):
        slurm(*ON_CPU, "--submit", "-o", "job.sh", "run_dir=runs/below/mine")
    assert sorted(tmp_path.rglob("*")) == before


def test_flags_reach_the_ranks_alone(slurm: Slurm) -> None:
    """`megalite place`, which the script runs too, knows none of them."""
    script = slurm(*ON_GPUS, "training.seed=7", "--allow-change", "--force")
    assert "-m launch.train config.yaml training.seed=7 --force --allow-change\n" in script
    assert script.count("--force") == 1 and script.count("--allow-change") == 1


FAKES = """
srun() { RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "${@: -3}"; }
squeue() { :; }
scontrol() { :; }
export -f srun squeue scontrol
"""


@pytest.mark.slow
def test_a_job_loads_no_code_of_its_folder(slurm: Slurm, tmp_path: Path) -> None:
    """The script itself, with a Slurm that answers nothing: the command, the processes above ranks, and a rank."""
    assert " -P -u -m torch.distributed.run " in slurm(*ON_GPUS, "--spawner", "torchrun")
    script = slurm("-N", "1", "--gpus-per-node", "0", "--ntasks-per-node", "2")
    plant(tmp_path)
    (tmp_path / "config.yaml").write_text("no config any more")
    environment = os.environ | {"PYTHONPATH": ":src", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    command = ["bash", "-c", FAKES + script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert loaded_from(tmp_path) == [], done
    assert "config.yaml" in done.stderr and done.stderr.count("megalite: error:") == 1, done
    assert done.returncode == USER_ERROR_CODE
