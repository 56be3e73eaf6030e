"""`megalite ray`: real Ray, in a network of its own, because it asks the internet for its own address."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from launch.backends.ray import LOST_CODE, report_exit_code
from launch.backends.ray_cluster import LOCAL_SETTINGS, MODE, REFUSED, TOKEN, check_address
from launch.cli.ray import ray
from launch.errors import LaunchError
from launch.runtime.started_modules import RAY_CLUSTER
from megalite.checkpoint.manifest import find_latest
from tests.conftest import write_config
from tests.helpers.audit import audit, events, steps_done
from tests.helpers.canaries import loaded_from, plant
from tests.helpers.commands import command_line
from tests.helpers.process_table import command_line as words_of
from tests.unit.launch.cli.test_app import MEGALITE

STEPS, BATCH = 40, 4
LONGEST_S = 420.0  # two attempts take under a minute of two idle cores; where others want them Ray may need a third
PARALLEL = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "data_parallel_size": 1}
ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$0" "$@"']
OUTWARD = (  # with an interface that other hosts could reach, which Ray prefers
    "ip link add eth0 type veth peer name peer; ip link set peer up; ip link set eth0 up; "
    "ip addr add 10.0.0.2/24 dev eth0; ip route add default via 10.0.0.1; "
)


def _why_not() -> str | None:
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed (pip install 'megalite[ray]'): NOTHING of `megalite ray` is tested"
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, check=False)
    return f"this machine gives no network namespaces ({tried.stderr.strip()})" if tried.returncode else None


needs_ray = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")


@pytest.fixture
def config(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    training = tiny["training"] | {"global_batch_size": BATCH, "steps": STEPS}
    return tiny | {
        "parallel": PARALLEL,
        "training": training,
        "checkpoint": {"interval": 20, "keep_last": 3},
        "monitor": {"plot": False, "report": False},
    }


def running(
    config: dict[str, Any], folder: Path, *words: str, network: list[str] = ALONE, **variables: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    """The command, with nothing left of it at the end; what it says is in `folder`/output."""
    command = [*network, str(MEGALITE), "ray", str(write_config(folder / "config.yaml", config)), *words]
    return started(command, folder, DS_ACCELERATOR="cpu", **variables)


@contextmanager
def started(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"HOME": str(folder), **variables}
    # the names of Ray's sockets have no room for a test's folder
    with (
        (folder / "output").open("w") as output,
        TemporaryDirectory(prefix="ray_", dir="/tmp", ignore_cleanup_errors=True) as short,
    ):
        environment["RAY_TMPDIR"] = short
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, cwd=folder, env=environment)
        try:
            yield process
        finally:
            left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for each in left:
                with suppress(psutil.Error):
                    each.kill()
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "output").read_text()
        time.sleep(0.05)


def process_of(run_dir: Path, rank: int) -> int:
    return int(json.loads((run_dir / ".ranks" / f"beat_{rank:04}.json").read_text())["process"])


def environments(run_dir: Path, process: subprocess.Popen[str], folder: Path) -> list[dict[str, str]]:
    """The variables of both ranks, as soon as each has given its first sign of life: their run may be short."""
    found: dict[int, dict[str, str]] = {}

    def are_read() -> bool:
        for rank in {0, 1} - found.keys():
            with suppress(OSError, ValueError, psutil.Error):  # it is being written, or not yet there
                found[rank] = psutil.Process(process_of(run_dir, rank)).environ()
        return len(found) == 2

    wait_until(are_read, process, folder)
    return [found[0], found[1]]


def inside(process: psutil.Process) -> list[str]:
    """The words that run a command in the network of a process."""
    return ["nsenter", "--net", "-t", str(process.pid)]


def check_that_strangers_stay_outside(family: list[psutil.Process], home: Path) -> Path:
    """Ray of this machine alone: it listens on loopback, wants a token that no file or command line has, and keeps its
    sockets and logs in a folder of its own, which is returned. Ray's own token is in a file that all users can read."""
    (store,) = (each for each in family if each.name() == "gcs_server")
    token = store.environ()[TOKEN]
    assert len(token) == 64 and not (home / ".ray" / "auth_token").exists()
    words = []
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # some of Ray's processes end at any moment
            words += each.cmdline()
    assert words and not any(token in word for word in words)
    folder = Path(store.environ()["RAY_TMPDIR"])
    assert folder.stat().st_mode & 0o077 == 0
    listening = subprocess.run([*inside(store), "ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    assert all("127.0.0.1" in line.split()[3] for line in listening.splitlines()), listening
    (address,) = (line.split()[3] for line in listening.splitlines() if "gcs_server" in line)
    knock = [*inside(store), sys.executable, "-m", RAY_CLUSTER, f"127.0.0.1:{address.rpartition(':')[2]}"]
    own = {MODE: "disabled", "HOME": "/nowhere", **LOCAL_SETTINGS}
    stranger = subprocess.run(knock, env=os.environ | own, check=False)
    assert stranger.returncode == REFUSED
    return folder


@contextmanager
def cluster(folder: Path, mode: str, token: str) -> Iterator[psutil.Process]:
    """A Ray cluster as an administrator starts it, at 127.0.0.1:6399 of a network of its own."""
    folder.mkdir()
    head = [str(MEGALITE.with_name("ray")), "start", "--head", "--block", "--port=6399", "--num-cpus=2"]
    head += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    with started([*ALONE, *head], folder, **{MODE: mode, TOKEN: token}) as process:
        wait_until(lambda: "Ray runtime started" in (folder / "output").read_text(), process, folder)
        yield psutil.Process(process.pid)


def check_that_a_mistake_is_told_once(output: str) -> None:
    """A mistake that only ranks see is one sentence, and is not repeated."""
    said = [line for line in output.splitlines() if line.startswith("megalite: ")]
    (told,) = (line for line in said if "error" in line)
    assert told.startswith("megalite: error: MEGALITE_PRIVATE_ENVIRONMENT names /nowhere, which cannot be read")
    assert said[-1] == "megalite: warning: not started again: exit code 2 (a mistake)"


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_ray
def test_a_cluster_without_tokens_is_refused_and_one_with_a_token_sees_no_secret(
    config: dict[str, Any], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Ray would connect to the first without a word, where everybody may run programs as this user. In the second,
    variables of this shell lay among the objects that every job of the cluster can read."""
    address, run_dir = ("--address", "127.0.0.1:6399", "--workers", "2"), Path(config["run_dir"])
    with cluster(tmp_path / "open", "disabled", "") as head:
        with running(config, tmp_path, *address, network=inside(head)) as process:
            assert process.wait(LONGEST_S) == 2
        (told,) = (line for line in (tmp_path / "output").read_text().splitlines() if "error" in line)
        assert "admits everybody without a token" in told and "--insecure-cluster" in told
        assert not (run_dir / "config.yaml").exists()
    with cluster(tmp_path / "closed", "token", "a" * 64) as head:
        with running(config, tmp_path, *address, network=inside(head), **{TOKEN: "b" * 64}) as process:
            assert process.wait(LONGEST_S) == 2
        assert "wants a token, and this user has another or none" in (tmp_path / "output").read_text()
        if pytestconfig.getoption("--exhaustive"):  # Ray takes 20 s to start ranks; unit tests have its parts
            # it travels to the ranks, which read it
            mistake = {TOKEN: "a" * 64, "MEGALITE_PRIVATE_ENVIRONMENT": "/nowhere"}
            words = (*address, f"run_dir={tmp_path / 'mistaken'}")
            with running(config, tmp_path, *words, network=inside(head), **mistake) as process:
                assert process.wait(LONGEST_S) == 2
            check_that_a_mistake_is_told_once((tmp_path / "output").read_text())
        secrets = {TOKEN: "a" * 64, "WANDB_API_KEY": "canary-of-wandb"}
        with running(config, tmp_path, *address, network=inside(head), **secrets) as process:
            found = environments(run_dir, process, tmp_path)
            assert [each["WANDB_API_KEY"] for each in found] == ["canary-of-wandb"] * 2
            assert not list((run_dir / "ray").glob(".private_*")), "the workers have read it"
            assert process.wait(LONGEST_S) == 0, (tmp_path / "output").read_text()
        assert f"step {STEPS}/{STEPS}" in (tmp_path / "output").read_text(), "rank 0 is heard"
        assert len(events(run_dir, "ended")) == 1
        found = [path for path in tmp_path.rglob("*") if path.is_file() and b"canary-of-wandb" in path.read_bytes()]
        assert not found


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_ray
def test_a_killed_rank_is_started_again_and_asked_to_end_nothing_is_left_behind(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Every sample counts once over both attempts."""
    run_dir = Path(config["run_dir"])
    config["training"] = config["training"] | {"steps": 100_000}
    words = ("--workers", "2", "--max-failures", "2")
    with running(config, plant(tmp_path), *words, network=[*ALONE[:-1], OUTWARD + ALONE[-1]]) as process:
        wait_until(lambda: find_latest(run_dir)[0] is not None, process, tmp_path)  # steps are faster than a save
        os.kill(process_of(run_dir, 1), signal.SIGKILL)
        wait_until(lambda: len(events(run_dir, "started")) == 2, process, tmp_path)
        resumed = steps_done(run_dir)
        wait_until(lambda: steps_done(run_dir) > resumed, process, tmp_path)
        family = psutil.Process(process.pid).children(recursive=True)
        folder = check_that_strangers_stay_outside(family, tmp_path)
        process.terminate()
        assert process.wait(LONGEST_S) == 75, (tmp_path / "output").read_text()
        _, living = psutil.wait_procs(family, timeout=10)
        assert not living, [words_of(each.pid) for each in living]
        assert not folder.exists()
    assert loaded_from(tmp_path) == [], "not by Ray's workers either"
    said = (tmp_path / "output").read_text()
    audit(run_dir, steps_done(run_dir), BATCH)
    assert events(run_dir, "started")[1]["step"] >= 20, "it resumed from a checkpoint"
    assert said.count("megalite: warning: restart") == 1 and "restart 1 of 2" in said
    assert len(events(run_dir, "preempted")) == 1
    newest, _ = find_latest(run_dir)
    assert newest is not None and newest.name == f"step_{steps_done(run_dir):08d}"


def test_the_rank_that_failed_first_decides_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ended(rank: int, code: int) -> str:
        return f"Training failed ...\nlaunch.backends.ray.RankEnded: rank {rank} ended with exit code {code}\n"

    assert report_exit_code({0: ended(0, 1), 1: ended(1, 137)}, tmp_path) == 137, "rank 0 only lost its peer"
    assert "rank 1 ended with exit code 137 (SIGKILL): its log is " in capsys.readouterr().err
    assert report_exit_code({0: ended(0, 75), 1: ended(1, 75)}, tmp_path) == 75
    assert report_exit_code({0: ended(0, 75), 1: "A worker health check failed."}, tmp_path) == LOST_CODE
    (tmp_path / "rank_1.log").write_text("megalite: error: old\nstep 1\nmegalite: error: the data is not here\n")
    capsys.readouterr()
    assert report_exit_code({1: ended(1, 2)}, tmp_path) == 2
    assert capsys.readouterr().err == "megalite: error: the data is not here\n"
    (tmp_path / "rank_0.log").write_text("megalite: error: the data is not here\n")
    assert report_exit_code({1: ended(1, 2)}, tmp_path) == 2
    assert capsys.readouterr().err == "", "the log of rank 0, which is shown, has it"
    before = {"rank_0.log": (tmp_path / "rank_0.log").stat().st_size}
    assert report_exit_code({1: ended(1, 2)}, tmp_path, before) == 2
    assert capsys.readouterr().err == "megalite: error: the data is not here\n", "rank 0 had it in a run before"
    before |= {"rank_1.log": (tmp_path / "rank_1.log").stat().st_size}
    assert report_exit_code({1: ended(1, 1)}, tmp_path, before) == 1
    assert "rank 1 ended with exit code 1" in capsys.readouterr().err, "so had rank 1"


def test_a_dry_run_says_what_it_would_start(config: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", config)
    done = command_line("ray", str(path), "--dry-run", env={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    sizes = "tensor 1 x pipeline 2 (schedule chosen at the start) x data 1"
    assert f"2 workers ({sizes}), 0 GPUs each, on a Ray cluster of this machine" in done.stdout
    assert "nothing was started" in done.stdout and not Path(config["run_dir"]).exists()


def test_without_ray_one_sentence_says_how_to_get_it(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"pip install 'megalite\[ray\]'"):
        ray(write_config(tmp_path / "c.yaml", config))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "3"], "makes 2 processes, but this run has 3"),
        (["--address", "auto", "parallel.data_parallel_size=auto"], "give --workers"),
        (["--address", "ray://somewhere:10001"], "is not auto or HOST:PORT of a Ray cluster"),
        (["--insecure-cluster"], "--insecure-cluster belongs to --address"),
        (["data.path=nowhere"], "nowhere"),
        (["checkpoint.resume=false"], "checkpoint.resume is false"),
    ],
    ids=["workers", "how many", "client", "insecure", "data", "resume"],
)
def test_a_mistake_is_one_sentence_before_ray_starts(
    config: dict[str, Any], tmp_path: Path, words: list[str], sentence: str
) -> None:
    path = write_config(tmp_path / "c.yaml", config)
    done = command_line("ray", str(path), *words, env={"DS_ACCELERATOR": "cpu"})
    assert done.returncode == 2
    assert done.stderr.startswith("megalite: error: ") and sentence in done.stderr and done.stderr.count("\n") == 1


def test_a_cluster_that_does_not_answer_is_told_at_once() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(LaunchError, match="nothing answers there"):
            check_address(f"127.0.0.1:{nobody.getsockname()[1]}")
