"""The agent touches only this user's processes and files, whatever marks others give to theirs."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.cluster.ssh.agent import LEFT_OVER_S, MARK, Agent, processes_of, remove_left_over, send
from launch.cluster.ssh.connection import LOADER, PROGRAM

NOBODY = 65534
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def attempt() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    for path in Path("/dev/shm").glob(f"megalite_{name}*"):
        path.unlink()


@pytest.fixture
def start(attempt: str) -> Iterator[Start]:
    """Starts a process that carries the mark of the attempt, perhaps another user's."""
    started = []

    def begin(**options: int) -> subprocess.Popen[bytes]:
        environment = {MARK: attempt, "RANK": str(len(started)), "PATH": os.environ["PATH"]}
        started.append(subprocess.Popen(["sleep", "60"], env=environment, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_marked_process_of_another_user_is_not_counted_signalled_or_killed(start: Start, attempt: str) -> None:
    own, foreign = start(), start(user=NOBODY, group=NOBODY, extra_groups=[])
    deadline = time.monotonic() + 10.0
    while Path(f"/proc/{foreign.pid}").stat().st_uid != NOBODY and time.monotonic() < deadline:
        time.sleep(0.01)
    foreign.send_signal(signal.SIGSTOP)  # which would end the attempt after a while
    agent = Agent({}, "word")
    agent.guard(attempt, 1e9, {})
    try:
        assert agent.ranks()["ranks"] == [{"rank": 0, "process": own.pid, "state": "S"}]
        assert agent.ranks()["processes"] == 1 and agent.signal(signal.SIGCONT) == {"ranks": [0]}
        send(attempt, [foreign.pid], signal.SIGKILL)
        assert agent.kill() == {"killed": 1, "left": []}
    finally:
        agent.release()
    assert own.wait(10) == -signal.SIGKILL and foreign.poll() is None


@pytest.mark.parametrize("has_handles", [True, False])
def test_a_process_without_the_mark_gets_no_signal(
    start: Start, attempt: str, has_handles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one has none that got the number of a rank after the rank had ended; also where Linux has no handles."""
    if not has_handles:
        monkeypatch.delattr(os, "pidfd_open")
    marked, other = start(), subprocess.Popen(["sleep", "60"])
    try:
        assert list(processes_of(attempt)) == [marked.pid]
        send(attempt, [other.pid, marked.pid, 1 << 22], signal.SIGTERM)
        assert marked.wait(10) == -signal.SIGTERM and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_name_that_somebody_has_taken_does_not_refuse_the_guard(attempt: str) -> None:
    Path(f"/dev/shm/megalite_{attempt}.{os.getpid()}").write_text("squatted")
    agent = Agent({}, "word")
    path = Path(agent.guard(attempt, 1e9, {"HF_TOKEN": "secret"})["private_environment"])
    assert json.loads(path.read_text())["HF_TOKEN"] == "secret" and path.stat().st_mode & 0o777 == 0o600
    agent.release()
    assert not path.exists()


@pytest.mark.parametrize("fails", ["tempfile.mkstemp", "json.dump"])
def test_an_agent_that_cannot_guard_has_no_lease(fails: str, attempt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full memory of the host: it refused, and killed the ranks once the lease that nobody renewed was over."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    agent = Agent({}, "word")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(fails, fail)
        agent.guard(attempt, 5.0, {})
    assert agent._lease_s == float("inf") and not list(Path("/dev/shm").glob(f"megalite_{attempt}*"))
    assert agent.guard(attempt, 1e9, {})["private_environment"], "and may try again"
    agent.release()


def test_what_a_killed_agent_left_is_removed_by_a_later_one_and_nothing_else(tmp_path: Path, attempt: str) -> None:
    text = json.dumps([*(path.read_text() for path in PROGRAM), "main(ACTIONS, 'word')"]).encode()
    command = [sys.executable, "-I", "-u", "-c", LOADER.format(len(text))]
    order = {"attempt": attempt, "lease_s": 1000, "private": {"HF_TOKEN": "secret"}}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdin is not None and killed.stdout is not None
        killed.stdin.write(text)
        killed.stdin.write(
            json.dumps({"id": 0, "confirmed": -1, "action": "guard", "arguments": order}).encode() + b"\n"
        )
        killed.stdin.flush()
        assert b"private_environment" in killed.stdout.readline()
        left = Path(f"/dev/shm/megalite_{attempt}.json")
        past = time.time() - LEFT_OVER_S - 60
        os.utime(left, (past, past))
        remove_left_over(left.parent)
        assert left.exists(), "its agent lives"
        killed.kill()
    os.utime(left)
    remove_left_over(left.parent)
    assert left.exists(), "ranks that have just been started may still read it"
    os.utime(left, (past, past))
    remove_left_over(left.parent)
    assert not left.exists()
    half_written = tmp_path / f"megalite_{attempt}.a_3bcdef"
    victim, foreign = tmp_path / "victim", tmp_path / f"megalite_{'1' * 32}.json"
    others = [
        tmp_path / name for name in ("another.json", "megalite_tokens_staged.bin", f"megalite_{attempt}.json.old")
    ]
    for path in (half_written, victim, foreign, *others):
        path.touch()
        os.utime(path, (past, past))
    link, pipe = (tmp_path / f"megalite_{digit * 32}.json" for digit in "23")
    link.symlink_to(victim)
    os.mkfifo(pipe)
    os.utime(link, (past, past), follow_symlinks=False)
    os.utime(pipe, (past, past))
    if os.geteuid() == 0:
        os.chown(foreign, NOBODY, NOBODY)
    remove_left_over(tmp_path)
    assert not half_written.exists() and all(path.exists() for path in (victim, *others)), "of the user's own making"
    assert link.is_symlink() and pipe.exists() and foreign.exists() == (os.geteuid() == 0)
