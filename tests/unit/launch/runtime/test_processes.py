"""The rules for stop signals, which hold for a command on this host and for a run on several alike."""

from __future__ import annotations

import math
import signal

import pytest

from launch.runtime.processes import StopAction, StopRequest
from megalite.resilience.signals import INTERRUPT_REPEAT_S, REPEAT_S

FORWARD, IGNORE, KILL = StopAction.FORWARD, StopAction.IGNORE, StopAction.KILL
SOON, LATER = REPEAT_S / 2, REPEAT_S + 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_one_leaves_the_grace_period_and_a_repeated_one_kills(number: int) -> None:
    stop = StopRequest(90.0)
    assert stop.note(number, 100.0) is FORWARD and stop.deadline == 190.0
    assert (stop.signal, stop.rank_signal) == (number, signal.SIGTERM), "ranks have no terminal to be closed"
    assert stop.note(number, 100.0 + SOON) is IGNORE, "Slurm signals each process of a job"
    assert stop.note(number, 100.0 + LATER) is KILL and stop.deadline == 190.0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_an_announcement_sets_no_limit_and_never_kills(number: int) -> None:
    stop = StopRequest(90.0)
    assert [stop.note(number, at) for at in (0.0, SOON, LATER, 100.0)] == [FORWARD, IGNORE, IGNORE, IGNORE]
    assert stop.deadline == math.inf and stop.rank_signal == number
    assert stop.note(signal.SIGTERM, 110.0) is FORWARD and stop.deadline == 200.0, "the first SIGTERM"


def test_without_a_grace_period_there_is_no_limit() -> None:
    stop = StopRequest(None)
    assert stop.note(signal.SIGTERM, 0.0) is FORWARD and stop.deadline == math.inf


def test_ctrl_c_sets_no_limit_and_is_repeated_sooner() -> None:
    """Who presses it can press it again, and does not count seconds; torchrun passes the first one on."""
    stop = StopRequest(90.0)
    assert stop.note(signal.SIGINT, 0.0) is FORWARD and stop.deadline == math.inf
    assert stop.was_interrupted and stop.rank_signal == signal.SIGINT
    assert stop.note(signal.SIGINT, INTERRUPT_REPEAT_S / 2) is IGNORE and not stop.is_urgent
    assert stop.note(signal.SIGTERM, 0.6) is FORWARD and stop.was_interrupted, "the first one says how it ends"
    assert stop.note(signal.SIGINT, INTERRUPT_REPEAT_S + 0.1) is KILL and stop.is_urgent
