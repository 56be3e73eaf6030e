"""Signals and deaths under DeepSpeed's own launcher: ranks get their time to save, and nothing outlives the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_supervise import MARK, marked, wait_until
from tests.helpers.commands import ROOT

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from launch.runtime.local_ranks import start_local_ranks
sys.exit(start_local_ranks(2, {"DS_ACCELERATOR": "cpu"}, sys.argv[1:], module="tests.helpers.fake_rank"))
"""


class Command:
    """What `megalite train` does with two ranks."""

    def __init__(self, folder: Path, behaviour: str) -> None:
        self.folder, self.mark = folder, folder.name + behaviour
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), behaviour],
            env=os.environ | {MARK: self.mark},
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )

    def wait_for_ranks(self) -> list[int]:
        """Until both ranks take signals; their process ids."""
        files = [self.folder / f"pid_{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def launcher(self) -> psutil.Process:
        (launcher,) = psutil.Process(self.process.pid).children()
        return launcher

    def got(self, rank: int) -> list[str]:
        """The signals that came to a rank."""
        return (self.folder / f"got_{rank}").read_text().split()

    def end(self, timeout_s: float) -> int:
        """The exit code; fails if a process is left."""
        code = self.process.wait(timeout=timeout_s)
        assert marked(self.mark) == []
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Command]]:
    started: list[Command] = []

    def begin(behaviour: str) -> Command:
        started.append(Command(tmp_path, behaviour))
        return started[-1]

    yield begin
    for one in started:
        for process in marked(one.mark):
            process.kill()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_ranks_get_the_signal_once_save_and_their_code_is_the_command_s(
    start: Callable[[str], Command], name: str
) -> None:
    """DeepSpeed's launcher must not get it: it would end the ranks and return 1."""
    command = start("save")
    command.wait_for_ranks()
    command.process.send_signal(getattr(signal, name))
    assert command.end(timeout_s=10) == 75
    assert command.got(0) == [name]
    assert command.got(1)[0] == name  # later the launcher, too, tells the slower rank to end


def test_a_signal_before_there_are_ranks_ends_the_start(start: Callable[[str], Command]) -> None:
    command = start("save")
    wait_until(lambda: len(marked(command.mark)) == 2)
    time.sleep(0.2)
    command.process.terminate()
    assert command.end(timeout_s=10) == 143


def test_a_rank_that_is_killed_is_told_by_the_code_and_the_other_ends(start: Callable[[str], Command]) -> None:
    command = start("crash")
    assert command.end(timeout_s=20) == 128 + signal.SIGKILL
    assert command.got(0) == ["SIGTERM"]


def test_ctrl_c_ends_the_ranks_at_once(start: Callable[[str], Command]) -> None:
    command = start("save")
    command.wait_for_ranks()
    command.process.send_signal(signal.SIGINT)
    assert command.end(timeout_s=10) == 130


@pytest.mark.parametrize("victim", ["command", "launcher"])
def test_ranks_do_not_outlive_a_command_or_launcher_that_is_killed(
    start: Callable[[str], Command], victim: str
) -> None:
    command = start("save")
    command.wait_for_ranks()
    (command.process if victim == "command" else command.launcher()).kill()
    code = command.process.wait(timeout=20)
    assert code == (-signal.SIGKILL if victim == "command" else 128 + signal.SIGKILL)
    wait_until(lambda: not marked(command.mark), timeout_s=10)
    assert [command.got(rank)[0] for rank in range(2)] == ["SIGTERM"] * 2, "they could save"
