"""Hosts that refuse what an attempt asks, or do not answer once: nothing is lost unseen, nothing waits for ever."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from launch.cluster import attempt
from launch.cluster.attempt import HostMonitor, HostsAttempt
from launch.cluster.ssh.connection import HostConnection, HostError, Refused
from launch.runtime.processes import StopSignals

RANK = {"rank": 0, "process": 1, "state": "S"}
FULL = Refused("host node1 cannot do what it was asked: OSError: [Errno 28] No space left on device")


class FakeHost:
    """A connection of which each action has answers in turn, the last one for ever; an exception is raised."""

    def __init__(self, **answers: list[dict[str, Any] | HostError]) -> None:
        self._answers, self.asked, self.is_open = answers, list[str](), True
        self.heard = time.monotonic()

    def ask(self, action: str, *, timeout_s: float, **_: object) -> dict[str, Any]:
        self.asked.append(action)
        answers = self._answers[action]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, HostError):
            if isinstance(answer, Refused):
                self.heard = time.monotonic()
            raise answer
        self.heard = time.monotonic()
        return answer

    def close(self) -> None:
        self.is_open = False


class OneSignal:
    """A user who asks once to end."""

    def __init__(self, number: int) -> None:
        self._received = [(number, time.monotonic())]

    def take(self) -> tuple[int, float] | None:
        return self._received.pop() if self._received else None


def monitor_of(host: FakeHost, again: list[FakeHost] | None = None) -> HostMonitor:
    """`again`: where the hosts of reconnections are added, whose agents refuse to guard."""

    def reconnect(name: str) -> HostConnection:
        assert again is not None
        again.append(FakeHost(guard=[FULL], ranks=[{"ranks": [], "processes": 0}]))
        return cast(HostConnection, again[-1])

    return HostMonitor({"node1": cast(HostConnection, host)}, {"attempt": "a"}, reconnect, 60.0)


@pytest.mark.parametrize("error", [FULL, HostError("host node1 has not answered for 10 s")], ids=["refused", "silent"])
def test_a_stop_signal_that_does_not_arrive_is_sent_again(
    error: HostError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks were killed, without a save, as if there were none yet."""
    monkeypatch.setattr(attempt, "RESEND_S", 0.05)
    host = FakeHost(signal=[error, {"ranks": [0]}], ranks=[{"ranks": [], "processes": 0}], kill=[{"left": []}])
    saved, ask = tmp_path / "saved", host.ask

    def ask_and_save(action: str, **arguments: Any) -> dict[str, Any]:
        answer = ask(action, **arguments)
        if action == "signal":
            saved.touch()  # the ranks end, and their launcher with them
        return answer

    monkeypatch.setattr(host, "ask", ask_and_save)
    command = ["sh", "-c", f"until test -e {saved}; do sleep 0.05; done; exit 75"]
    ended = HostsAttempt(command, os.environ, monitor_of(host), 60.0, lambda: None).run(
        cast(StopSignals, OneSignal(signal.SIGTERM))
    )
    assert saved.exists() and ended.code == 75 and host.asked[:2] == ["signal", "signal"]


def test_where_all_hosts_say_that_they_have_no_ranks_there_is_nothing_to_wait_for() -> None:
    host = FakeHost(signal=[{"ranks": []}], kill=[{"left": []}])
    ended = HostsAttempt(["sleep", "60"], os.environ, monitor_of(host), 60.0, lambda: None).run(
        cast(StopSignals, OneSignal(signal.SIGINT))
    )
    assert ended.code == 128 + signal.SIGINT and host.asked == ["signal", "kill"]


def test_ranks_of_a_host_that_does_not_say_are_not_taken_for_ended() -> None:
    monitor = monitor_of(FakeHost(ranks=[{"ranks": [RANK], "processes": 1}, FULL]))
    monitor._ranks["node1"] = 3  # as polled last
    assert [monitor.count_ranks(), monitor.count_ranks()] == [1, 3]


@pytest.mark.timeout(60)
def test_a_host_that_refuses_to_kill_is_given_up_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was asked for ever, since each refusal is a sign of life."""
    monkeypatch.setattr(attempt, "KILL_S", 0.3)
    host = FakeHost(kill=[FULL])
    monitor = monitor_of(host)
    with caplog.at_level(logging.WARNING, "launch"):
        assert monitor.kill() == ["node1"] and monitor.unkilled == {"node1"}
    assert len(host.asked) > 1, "it may pass"
    assert caplog.messages == [str(FULL), f"{FULL}: look there for processes of the run that are left, and end them"]
    passing = FakeHost(kill=[FULL, {"left": []}])
    monitor = monitor_of(passing)
    assert monitor.kill() == [] and not monitor.unkilled


def test_a_connection_whose_agent_refuses_to_guard_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One more ssh was left open every two seconds."""
    monkeypatch.setattr(attempt, "POLL_S", 0.01)
    again: list[FakeHost] = []
    broken = FakeHost()
    broken.is_open, broken.heard = False, 0.0
    with caplog.at_level(logging.WARNING, "launch"), monitor_of(broken, again) as monitor:
        deadline = time.monotonic() + 20
        while len(again) < 4 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        assert monitor.lost() == ["node1"], "nobody guards its ranks"
    assert len(again) >= 4 and not any(host.is_open for host in again[:3])
    assert caplog.messages == [str(FULL)]
