"""A run's folder takes one run, and whatever strangers put there hurts neither the run's user nor the run."""

from __future__ import annotations

import os
import random
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.checkpoints.listing import list_place
from launch.errors import USER_ERRORS, LaunchError
from launch.inspection.run_files import RunFiles
from launch.inspection.status import read_status
from launch.runtime.console import Console
from launch.runtime.run_lock import is_locked, lock_holder, take_lock
from launch.supervision.run_progress import RunProgress
from launch.supervision.supervisor import AttemptEnd, CommandSupervisor, Policy, announced_restart
from launch.trainer.start.run_folder import (
    FILES,
    FOLDERS,
    OWN_FOLDERS,
    RunFolderInUse,
    check_run_folder,
    lock_run_folder,
)
from megalite.checkpoint.atomic_folder import new_folder
from megalite.checkpoint.durable_files import write_durably
from megalite.checkpoint.manifest import find_latest
from megalite.config import Config
from megalite.monitor.events import EventLog
from megalite.monitor.loss_picture import plot_loss
from megalite.monitor.sinks.jsonl import JsonLinesSink
from megalite.resilience.heartbeat import beat_times, read_beats, write_line
from megalite.resilience.rank_registry import RankFile, look_for


def test_a_lock_that_is_let_go_is_waited_for_by_those_who_may(tiny: dict[str, Any]) -> None:
    """A file server keeps the lock of a host that has died for a while; whose it is, is told."""
    config = Config.model_validate(tiny)
    held = lock_run_folder(config)
    holder = rf"another run is using run_dir .* \(process {os.getpid()} on {socket.gethostname()} has its lock\): wait"
    with pytest.raises(RunFolderInUse, match=holder):
        lock_run_folder(config)
    with pytest.raises(LaunchError, match="another run is using run_dir"):
        lock_run_folder(config, patience_s=0.6)
    threading.Timer(0.6, held.close).start()
    lock_run_folder(config, patience_s=20).close()


def _keep_output(run_dir: Path) -> None:
    console = Console()
    console.keep_in(run_dir / "console_rank_0.log")
    console.keep_unwritten(b"a line\n", None)


def _log_restart(run_dir: Path) -> None:
    supervisor = CommandSupervisor(["true"], Policy(), run_dir, None)
    supervisor._log("restart 1 of 1 in 60 s: it failed")
    supervisor._record(0.0, AttemptEnd(1), 1)
    announced_restart(run_dir)


def _log_step(run_dir: Path) -> None:
    JsonLinesSink(run_dir / "metrics.jsonl", 3).on_step({"step": 4, "loss": 1.0})


def _beat(run_dir: Path) -> None:
    write_line(run_dir / ".ranks" / "beat_0000.json", "{}")
    read_beats(run_dir, "attempt")


def _register(run_dir: Path) -> None:
    RankFile(run_dir, 0).close()
    look_for(run_dir, 0)


def _make_tokenizer(run_dir: Path) -> None:
    with new_folder(run_dir / "tokenizer", overwrite=True, marker="tokenizer.json") as folder:
        (folder / "tokenizer.json").write_text("{}")


PATIENCE_S = 15.0  # a pipe would be waited for for ever; on an idle machine nothing here takes a second
TOUCHED: dict[str, Callable[[Path], object]] = {  # name in a run's folder -> what a run does with it
    ".lock": lambda run_dir: take_lock(run_dir).close(),
    "config.yaml": lambda run_dir: write_durably(run_dir / "config.yaml", b"x"),
    "receipt.json": lambda run_dir: write_durably(run_dir / "receipt.json", b"{}"),
    "checkpoints/latest": lambda run_dir: write_durably(run_dir / "checkpoints" / "latest", b"step_4"),
    "checkpoints/step_4/manifest.json": find_latest,
    ".config.yaml.tmp": lambda run_dir: write_durably(run_dir / "config.yaml", b"x"),
    "metrics.jsonl": _log_step,
    ".metrics.jsonl.tmp": _log_step,
    "events.jsonl": lambda run_dir: EventLog(run_dir / "events.jsonl").write("started"),
    "loss.png": lambda run_dir: plot_loss([], run_dir / "loss.png", ""),
    "console_rank_0.log": _keep_output,
    "supervisor.log": _log_restart,
    "attempts.jsonl": _log_restart,
    ".ranks/beat_0000.json": _beat,
    ".ranks/rank_0000.txt": _register,
    ".ranks": lambda run_dir: (_register(run_dir), _beat(run_dir)),
    ".tokenizer.tmp": _make_tokenizer,
    ".tokenizer.tmp/conversion.lock": _make_tokenizer,
}
READ = (
    *(is_locked, lock_holder, RunProgress.read, RunFiles.read, announced_restart, beat_times, read_status),
    lambda run_dir: list_place(str(run_dir)),
)
PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda path, victim: path.symlink_to(victim),
    "link to a folder": lambda path, victim: path.symlink_to(victim.parent),
    "link to nothing": lambda path, victim: path.symlink_to(victim.parent / "made"),
    "pipe": lambda path, victim: os.mkfifo(path),
    "folder": lambda path, victim: path.mkdir(),
    "empty": lambda path, victim: path.touch(),
    # lines are all read, however many they are
    "huge": lambda path, victim: (path.touch(), os.truncate(path, 1 << (27 if path.suffix == ".jsonl" else 30))),
    "random": lambda path, victim: path.write_bytes(random.Random(0).randbytes(100_000)),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_what_strangers_plant_in_a_run_s_folder_hurts_no_other_file_and_nothing_waits(
    tmp_path: Path, plant: str
) -> None:
    """Each file that a run opens, in turn; whatever goes wrong is one sentence."""
    problems = []
    for name, touch in TOUCHED.items():
        run_dir, victims = tmp_path / name.replace("/", "_"), tmp_path / f"victims of {name.replace('/', '_')}"
        (run_dir / name).parent.mkdir(parents=True)
        victims.mkdir()
        (victims / "victim").write_bytes(b"precious")
        PLANTS[plant](run_dir / name, victims / "victim")
        for work in (*READ, touch, *READ):
            done: list[object] = []

            def attempt(
                work: Callable[[Path], object] = work, run_dir: Path = run_dir, done: list[object] = done
            ) -> None:
                try:
                    done.append(work(run_dir))
                except (OSError, ValueError) as error:  # a refusal
                    done.append(error)

            thread = threading.Thread(target=attempt, daemon=True)
            thread.start()
            thread.join(PATIENCE_S)
            if not done:
                problems.append(f"{work} hangs or breaks for {plant} as {name}")
        if [(path.name, path.read_bytes()) for path in victims.iterdir()] != [("victim", b"precious")]:
            problems.append(f"{plant} as {name}: its target has changed")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("plant", ["link to a file", "link to nothing", "pipe", "folder"])
@pytest.mark.parametrize("name", [*FILES, *OWN_FOLDERS])
def test_what_is_planted_is_named_before_a_start(tiny: dict[str, Any], name: str, plant: str, tmp_path: Path) -> None:
    if name in OWN_FOLDERS and plant == "folder":
        return
    config = Config.model_validate(tiny)
    config.run_dir.mkdir(parents=True)
    PLANTS[plant](config.run_dir / name, tmp_path / "victim")
    for look in (check_run_folder, lock_run_folder):
        with pytest.raises(USER_ERRORS, match=rf"/{name} is a .*: move it away, or choose another run_dir$"):
            look(config)
    assert not (tmp_path / "victim").exists()


def _folder(config: Config, mode: int, user: int = 0, group: int = 0) -> None:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    os.chown(config.run_dir, user, group)
    config.run_dir.chmod(mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_that_others_can_change_takes_a_run_only_if_they_are_trusted(tiny: dict[str, Any]) -> None:
    config = Config.model_validate(tiny)
    for look in (check_run_folder, lock_run_folder):
        for mode in (0o777, 0o1777):
            _folder(config, mode)
            for shared in (False, True):
                with pytest.raises(LaunchError, match=r"may be written by every user of this machine.*: chmod o-w it"):
                    look(config, shared=shared)
        for mode, user, group, sentence in (
            (0o755, 65534, 65534, r"belongs to user \S+, and you are user root: .*trust its owner with --shared-run-d"),
            (0o775, 0, 65534, "may be written by a group, .*: chmod g-w it, or trust them with --shared-run-dir"),
        ):
            _folder(config, mode, user, group)
            with pytest.raises(LaunchError, match=sentence):
                look(config)
            if (lock := look(config, shared=True)) is not None:
                lock.close()
        for mode in (0o755, 0o775):  # root's group is root's alone
            _folder(config, mode)
            if (lock := look(config)) is not None:
                lock.close()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_checkpoints_that_all_can_write_is_refused_before_a_start(tiny: dict[str, Any], name: str) -> None:
    config = Config.model_validate(tiny)
    (config.run_dir / name).mkdir(parents=True)
    check_run_folder(config)
    (config.run_dir / name).chmod(0o1777)
    with pytest.raises(LaunchError, match=rf"/{name} may be written by every user of this machine: chmod o-w it$"):
        check_run_folder(config, shared=True)


def test_a_run_s_folder_is_its_user_s_even_without_a_umask(tiny: dict[str, Any]) -> None:
    config = Config.model_validate(tiny)
    before = os.umask(0)
    try:
        lock_run_folder(config).close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (config.run_dir, config.run_dir / ".lock")] == [0o755, 0o644]
