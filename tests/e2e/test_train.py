"""`megalite train` as a user runs it: real launchers, real ranks, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch.inference.stored_model import open_stored
from megalite.monitor.events import EVENTS, read_events
from tests.conftest import write_config
from tests.helpers.canaries import loaded_from, plant
from tests.helpers.commands import BIN, ROOT, command_line, metrics, run
from tests.helpers.process_table import listening
from tests.helpers.warm_runs import session
from tests.helpers.warm_runs import train as warm_train

pytestmark = pytest.mark.slow

EXACT = ("step", "loss", "grad_norm", "learning_rate", "samples", "tokens_seen")


def curve(run_dir: str | Path) -> list[tuple[Any, ...]]:
    """What must be equal between two runs of the same thing."""
    return [tuple(str(record[name]) for name in EXACT) for record in metrics(run_dir)]


@pytest.fixture
def two_stages(tiny: dict[str, Any]) -> dict[str, Any]:
    """The tiny config on two ranks."""
    return tiny | {"parallel": {"pipeline_parallel_size": 2}}


def test_a_run_leaves_what_it_promises(two_stages: dict[str, Any], tmp_path: Path) -> None:
    two_stages["training"]["evaluation"] = {"interval": 2, "samples": 4}
    two_stages["monitor"] = {"wandb": {"enabled": True}}  # offline: must not need a network
    download = plant(tmp_path / "download")
    words = ["train", write_config(tmp_path / "c.yaml", two_stages), "--restart", "1"]
    without_umask = ["sh", "-c", 'umask 0 && exec "$0" "$@"']  # as in some containers
    done = run(*without_umask, BIN / "megalite", *words, cwd=download)
    assert done.returncode == 0, done.stderr
    assert loaded_from(download) == [], "the current folder may be somebody else's"
    folder = Path(two_stages["run_dir"])
    made = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    assert [path for path in made if path.stat().st_mode & 0o022] == [], "others could change these"
    records = metrics(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["samples"] for record in records] == [[0, 4], [4, 8], [8, 12], [12, 16]]
    assert "evaluation_loss" in records[1] and "evaluation_loss" not in records[0]
    assert records[-1]["tokens_seen"] == 4 * 4 * 32
    assert records[0]["memory_peak_mib"] > 50 and records[0]["tokens_per_second"] > 0
    for record in records:
        assert record["samples_per_second"] == pytest.approx(4 / record["step_time_s"])
    assert " step 1/4 loss " in done.stdout and " samples/s " in done.stdout
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["layout"]["pipeline_parallel_size"] == 2 and receipt["outcome"]["finished"] is True
    assert receipt["versions"]["torch"] and receipt["data_fingerprint"]
    settings = json.loads((folder / "deepspeed.json").read_text())
    assert settings["zero_optimization"]["stage"] == 1 and settings["gradient_clipping"] == 1.0
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000004"
    again = command_line("train", str(folder / "config.yaml"), env={"DS_ACCELERATOR": "cpu"})
    assert again.returncode == 0 and "nothing left to train" in again.stdout
    moved = folder.rename(tmp_path / "moved")
    stored = open_stored(moved)
    assert stored.manifest is not None and stored.manifest.tokenizer == "../../model_tokenizer"
    assert stored.tokenizer == moved / "model_tokenizer" and stored.loaded_tokenizer.ids("def")
    on = warm_train(tmp_path, two_stages, f"run_dir={moved}", "training.steps=5")
    assert "resumes from step 4 of 5 (" in on, on
    started = [event for event in read_events(moved / EVENTS) if event["event"] == "started"]
    assert [event["total_steps"] for event in started] == [4, 5], "which `status` and `ls` show"


def test_killed_and_resumed_equals_uninterrupted_to_the_last_bit(two_stages: dict[str, Any], tmp_path: Path) -> None:
    """Twenty steps at once, and twenty with a SIGKILL of every process somewhere after the checkpoint of step 10."""
    two_stages["training"]["steps"] = 20
    two_stages["checkpoint"] = {"interval": 10}
    path = write_config(tmp_path / "c.yaml", two_stages)
    warm_train(tmp_path, two_stages)

    cut = tmp_path / "cut"
    command = [str(BIN / "megalite"), "train", str(path), f"run_dir={cut}"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # as the other run
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (cut / "checkpoints" / "step_00000010").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    _kill_family(process.pid)
    process.wait()
    assert not (cut / "checkpoints" / "step_00000020").exists(), "the kill came too late to test anything"

    resumed = warm_train(tmp_path, two_stages, f"run_dir={cut}")
    assert f"resumes from step 10 of 20 ({cut}/checkpoints/step_00000010)" in resumed
    assert curve(cut) == curve(two_stages["run_dir"])


def _kill_family(pid: int) -> None:
    """SIGKILL to a process and all its descendants, the launcher's session included."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in listing.splitlines()[1:]]
    family = {pid}
    for _ in range(6):
        family |= {child for child, parent in parents if parent in family}
    for member in family:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself meanwhile


@pytest.mark.parametrize(
    "others", [("deepspeed", "torchrun"), pytest.param(("module",), marks=pytest.mark.exhaustive)], ids=", ".join
)
def test_every_launcher_is_the_same_run(two_stages: dict[str, Any], tmp_path: Path, others: tuple[str, ...]) -> None:
    """As that of ranks that nobody launched; `megalite train` is compared with these where it is killed above."""
    path = write_config(tmp_path / "c.yaml", two_stages)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    hosts = ["--hostfile", hostfile, "--no_ssh_check", "--master_addr", "127.0.0.1"]  # no sshd is needed for one host
    launchers: dict[str, list[str | Path]] = {
        "deepspeed": [BIN / "deepspeed", *hosts, "launch/train.py"],
        "module": [BIN / "deepspeed", "--num_gpus", "2", "--module", "launch.train"],
        "torchrun": [BIN / "torchrun", "--nproc-per-node", "2", "-m", "launch.train"],
    }
    warm_train(tmp_path, two_stages)
    wanted = curve(two_stages["run_dir"])
    assert len(wanted) == 4
    for name in others:
        done = run(*launchers[name], path, f"run_dir={tmp_path / name}", "monitor.plot=false", OMP_NUM_THREADS="1")
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert curve(tmp_path / name) == wanted, name


def test_it_runs_where_no_compiler_exists(tiny: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed compiles a collective at every CPU start unless told not to, and fails where it cannot."""
    bare, cache = tmp_path / "bin", tmp_path / "extensions"
    bare.mkdir()
    (bare / "python").symlink_to(BIN / "python")
    words = (BIN / "megalite", "train", write_config(tmp_path / "c.yaml", tiny))
    done = run(*words, PATH=str(bare), CC="", CXX="", TORCH_EXTENSIONS_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    assert not cache.exists() or not list(cache.iterdir())


def test_gradients_that_are_never_finite_stop_the_run(two_stages: dict[str, Any], tmp_path: Path) -> None:
    """Skipped steps are counted, logged and bounded; the weights of the last good step stay."""
    two_stages["training"] |= {"steps": 50, "gradient_clipping": 0.0}
    two_stages["guards"] = {"max_interventions": 3}
    two_stages["optimizer"] = {"name": "sgd", "learning_rate": 1e30}
    with session(tmp_path, two_stages) as running:
        assert running.wait() == [3, 3], running.output()
        said = running.output()
    told = [line for line in said.splitlines() if "megalite: warning: " in line or "megalite: error: " in line]
    assert any("3 steps in a row were skipped" in line for line in told) and any("samples" in line for line in told)
    assert "Traceback" not in said
    records = metrics(two_stages["run_dir"])
    assert [record["skipped"] for record in records[-3:]] == [True] * 3
    assert records[-1]["skipped_steps"] == 3 and records[-1]["grad_norm"] is None


def test_a_healthy_run_passes_its_self_checks(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Every second step, and step 3 because it is saved; the numbers are those of a run without."""
    tiny |= {"parallel": {"tensor_parallel_size": 2}, "checkpoint": {"interval": 3}}
    warm_train(tmp_path, tiny, "training.self_check_every=2")
    records = metrics(tiny["run_dir"])
    assert ["self_check_s" in record for record in records] == [False, True, True, True]
    warm_train(tmp_path, tiny, f"run_dir={tmp_path / 'without'}")
    assert curve(tmp_path / "without") == curve(tiny["run_dir"])
    assert not any("self_check_s" in record for record in metrics(tmp_path / "without"))


def test_nothing_outlives_the_command_and_a_folder_takes_one_run(two_stages: dict[str, Any], tmp_path: Path) -> None:
    """SIGKILL of `megalite` itself: it can pass nothing on any more, and its ranks must still end."""
    two_stages["training"]["steps"] = 100_000
    path = write_config(tmp_path / "c.yaml", two_stages)
    process = subprocess.Popen(
        [str(BIN / "megalite"), "train", str(path)],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = Path(two_stages["run_dir"]) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert listening(process.pid) == {"127.0.0.1"}, "gloo; the ranks themselves meet in a folder"
    second = command_line("train", str(path), env={"DS_ACCELERATOR": "cpu"})
    assert second.returncode == 2 and "another run is using run_dir" in second.stderr
    told = command_line("status", two_stages["run_dir"], "--json")
    status = json.loads(told.stdout)
    assert told.returncode == 0 and status["state"] == "running" and status["left_s"] > 0, status
    assert status["step"] < status["total_steps"] == 100_000 and status["samples_per_second"] > 0
    process.kill()
    process.wait()
    while ranks_of(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not ranks_of(path)
    # its memory goes before its lock, so a process without arguments may still hold that for a moment
    while (told := command_line("status", two_stages["run_dir"])).returncode != 1:
        time.sleep(0.1)
        assert time.monotonic() < deadline, f"it makes no progress any more: {told.stdout}"


def ranks_of(path: Path) -> list[str]:
    """Processes that were started for this config."""
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if str(path) in line]


def test_a_resume_says_what_changed_and_tokens_end_where_they_say(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Five steps of 8 samples, two of 16, then tokens: their number is counted from those that were seen."""
    one = partial(warm_train, tmp_path, tiny, world_size=1)
    first = one("training.global_batch_size=8", "training.steps=5")
    assert f"run: {tiny['run_dir']}, new" in first and "length: 5 steps, 1,280 tokens" in first
    one("training.global_batch_size=16", "training.steps=7")
    tokens = (5 * 8 + 2 * 16 + 3 * 16) * 32 - 100  # a step more than is whole
    words = ["training.global_batch_size=16", "training.steps=null", f"training.tokens={tokens}"]
    with session(tmp_path, tiny, *words, "data.document_mask=true", world_size=1) as refused:
        assert refused.wait() == [2] and "give --allow-change" in refused.output()
    said = one(*words, "data.document_mask=true", "optimizer.learning_rate=1e-3", "--allow-change")
    assert "resumes from step 7 of 10" in said and "changed: optimizer.learning_rate 0.0003 -> 0.001" in said
    records = metrics(tiny["run_dir"])
    assert [record["step"] for record in records] == list(range(1, 11))
    assert records[-1]["tokens_seen"] == tokens + 100 and records[-1]["learning_rate"] == pytest.approx(1e-4)
    events = [json.loads(line) for line in (Path(tiny["run_dir"]) / "events.jsonl").read_text().splitlines()]
    (*_, changed) = [event for event in events if event["event"] == "config_changed"]
    assert changed["step"] == 7 and [one["option"] for one in changed["changes"]] == [
        "data.document_mask",
        "optimizer.learning_rate",
        "training.steps",
        "training.tokens",
    ]
    env = {"DS_ACCELERATOR": "cpu"}
    after = command_line("train", str(tmp_path / "config.yaml"), *words, "--allow-change", env=env)
    assert after.returncode == 0 and "is at step 10 of 10: nothing left to train" in after.stdout, after.stderr
