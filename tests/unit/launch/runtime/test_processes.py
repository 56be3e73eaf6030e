"""The rules for stop signals, which hold for a command on this host and for a run on several alike."""

from __future__ import annotations

import math
import signal

import pytest

from launch.runtime.processes import INTERRUPT_S, REPEAT_S, StopAction, StopRequest

FORWARD, IGNORE, KILL = StopAction.FORWARD, StopAction.IGNORE, StopAction.KILL
SOON, LATER = REPEAT_S / 2, REPEAT_S + 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_one_leaves_the_grace_period_and_a_repeated_one_kills(number: int) -> None:
    stop = StopRequest(90.0, INTERRUPT_S)
    assert stop.note(number, 100.0) is FORWARD and stop.deadline == 190.0
    assert (stop.signal, stop.rank_signal) == (number, signal.SIGTERM), "ranks have no terminal to be closed"
    assert stop.note(number, 100.0 + SOON) is IGNORE, "Slurm signals each process of a job"
    assert stop.note(number, 100.0 + LATER) is KILL and stop.deadline == 190.0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_an_announcement_sets_no_limit_and_never_kills(number: int) -> None:
    stop = StopRequest(90.0, INTERRUPT_S)
    assert [stop.note(number, at) for at in (0.0, SOON, LATER, 100.0)] == [FORWARD, IGNORE, IGNORE, IGNORE]
    assert stop.deadline == math.inf and stop.rank_signal == number
    assert stop.note(signal.SIGTERM, 110.0) is FORWARD and stop.deadline == 200.0, "the first SIGTERM"


def test_without_a_grace_period_there_is_no_limit() -> None:
    stop = StopRequest(None, INTERRUPT_S)
    assert stop.note(signal.SIGTERM, 0.0) is FORWARD and stop.deadline == math.inf


def test_ctrl_c_leaves_time_for_clean_up_or_none() -> None:
    stop = StopRequest(90.0, INTERRUPT_S)
    assert stop.note(signal.SIGTERM, 0.0) is FORWARD and stop.note(signal.SIGINT, 1.0) is FORWARD
    assert stop.was_interrupted and stop.deadline == 1.0 + INTERRUPT_S and stop.signal == signal.SIGTERM
    assert stop.note(signal.SIGINT, 1.0 + LATER) is KILL
    assert StopRequest(90.0, interrupt_s=0).note(signal.SIGINT, 0.0) is KILL
