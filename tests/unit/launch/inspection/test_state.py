"""The state of a run by its traces: the living and the dead are told apart, also where locks cannot be seen."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from launch.inspection.state import RunState, Traces, infer_state, is_alive
from launch.runtime.run_lock import LOCK, LockHolder, take_lock

CASES = {
    "makes steps": (Traces(True, 3, 300, True, True), RunState.RUNNING),
    "makes steps on a host whose locks cannot be seen": (Traces(None, 3, 300, True, True), RunState.RUNNING),
    "has been silent for too long": (Traces(True, 301, 300, True, True), RunState.HUNG),
    "starts for the first time": (Traces(True, 40, 1800), RunState.WAITING),
    "starts again after it ended": (
        Traces(True, 5, 1800, True, False, "ended", is_started_again=True),
        RunState.WAITING,
    ),
    "starts for too long": (Traces(True, 1801, 1800), RunState.HUNG),
    "waits for its supervisor": (
        Traces(False, 5, 300, True, True, restart="restart 1 of 5 in 8 s: exit code 1"),
        RunState.WAITING,
    ),
    "hung, and its supervisor starts it again": (
        Traces(False, 5, 300, True, True, "hung", restart="restart 1 of 5 in 8 s: exit code 86"),
        RunState.WAITING,
    ),
    "has ended": (Traces(False, 1e6, 300, True, True, "ended"), RunState.ENDED),
    "has ended, its last export goes on": (Traces(True, 900, 300, True, True, "ended"), RunState.ENDED),
    "was refused when it was to be extended": (
        Traces(False, 5, 300, True, True, "ended", is_started_again=True),
        RunState.ENDED,
    ),
    "Ctrl-C": (Traces(False, 5, 300, True, True, "interrupted"), RunState.INTERRUPTED),
    "SIGTERM": (Traces(False, 5, 300, True, True, "preempted"), RunState.PREEMPTED),
    "guard": (Traces(False, 5, 300, True, True, "stopped"), RunState.STOPPED),
    "watchdog": (Traces(False, 5, 300, True, True, "hung"), RunState.HUNG),
    "killed": (Traces(False, 5, 300, True, True), RunState.FAILED),
    "its host is gone": (Traces(None, 301, 300, True, True), RunState.FAILED),
    "killed in its first start": (Traces(False, 5, 1800), RunState.NOT_STARTED),
    "crashed in its first step": (Traces(False, 5, 1800, True), RunState.FAILED),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_run_has_its_state(case: str) -> None:
    traces, expected = CASES[case]
    state, reason = infer_state(traces)
    assert state is expected and reason, reason
    healthy = {RunState.RUNNING, RunState.WAITING, RunState.ENDED}
    assert state.is_healthy == (state in healthy)


ERROR = "rank 1 ended with RuntimeError: out of memory"
BEFORE = f"ended before its first step: {ERROR}; see the output of the command that started it"


@pytest.mark.parametrize(
    ("traces", "said"),
    [
        (Traces(False, 5, 1800, error=ERROR), f"it {BEFORE}"),
        (Traces(False, 5, 1800, True, error=ERROR), f"its last start {BEFORE}"),
        (Traces(False, 5, 1800, True, True, is_started_again=True, error=ERROR), f"its last start {BEFORE}"),
        (Traces(False, 5, 1800, True, True, error=ERROR), f"no end of its last session: {ERROR}"),
        (Traces(None, 1801, 1800, True, error=ERROR), f"no end of its last session: {ERROR}"),
    ],
)
def test_a_run_that_crashed_says_when_and_why(traces: Traces, said: str) -> None:
    """ "It wrote down no end" left a reader to find out that not one step was made."""
    assert infer_state(traces)[1].endswith(said)


def beat(run_dir: Path, age_s: float) -> None:
    path = run_dir / ".ranks" / "beat_0000.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    os.utime(path, (time.time() - age_s,) * 2)


def elsewhere(run_dir: Path, age_s: float = 0.0) -> LockHolder:
    holder = LockHolder("node7", 4711, time.time() - age_s)
    (run_dir / LOCK).write_text(json.dumps(vars(holder)))
    return holder


def test_life_on_another_host_shows_in_its_heartbeats_alone(tmp_path: Path) -> None:
    """Its lock is free here: the file system keeps locks of each host, or the host has died."""
    holder = elsewhere(tmp_path, age_s=900)
    assert is_alive(tmp_path, holder, None) is None
    beat(tmp_path, age_s=2)
    assert is_alive(tmp_path, holder, None) is True
    beat(tmp_path, age_s=100)
    assert is_alive(tmp_path, holder, None) is False
    assert is_alive(tmp_path, elsewhere(tmp_path, age_s=10), None) is None, "they are of an attempt before this start"


def test_life_on_this_host_shows_in_the_lock(tmp_path: Path) -> None:
    with take_lock(tmp_path):
        assert is_alive(tmp_path, None, "whatever") is True
    gone = LockHolder(socket.gethostname(), 2**22 + 1, time.time())  # above the largest process id
    assert is_alive(tmp_path, gone, None) is False
    (tmp_path / LOCK).write_text("")  # of an older version
    assert is_alive(tmp_path, None, socket.gethostname()) is False
    assert is_alive(tmp_path, None, None) is False and is_alive(tmp_path, None, "node7") is None


def test_a_process_that_is_about_to_take_the_lock_again_lives(tmp_path: Path) -> None:
    """`megalite train` takes it to check the folder, and its rank 0 takes it seconds later."""
    take_lock(tmp_path).close()
    assert is_alive(tmp_path, LockHolder(socket.gethostname(), os.getpid(), time.time()), None) is True
