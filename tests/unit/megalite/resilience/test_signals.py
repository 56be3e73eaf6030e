"""Signals to a process whose main thread waits in native code that never returns: a mutex that is locked twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from megalite.resilience.signals import INTERRUPT_REPEAT_S, REPEAT_S

STUCK = """
import ctypes, os
from launch.runtime.logs import configure_logging
from megalite.resilience.signals import take_signals

configure_logging()
signals = take_signals()
{settings}
mutex = ctypes.create_string_buffer(64)
print("ready", flush=True)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
TRAINS = "signals.begin_training(lambda number: f'asked to end by {number}')\n"


@pytest.fixture
def stuck() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(settings: str = "") -> subprocess.Popen[str]:
        program = [sys.executable, "-c", STUCK.format(settings=settings)]
        own = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
        process = subprocess.Popen(program, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[[str], subprocess.Popen[str]]


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [("SIGINT", 130, "interrupted"), ("SIGTERM", 75, "ended by SIGTERM"), ("SIGHUP", 75, "ended by SIGHUP")],
)
def test_before_training_a_signal_ends_the_process(stuck: Start, name: str, code: int, says: str) -> None:
    process = stuck("")
    process.send_signal(getattr(signal, name))
    _, said = process.communicate(timeout=5)
    assert (process.returncode, said) == (code, f"megalite: warning: {says} during start-up, no step was taken\n")


def test_in_training_the_first_is_a_request_and_the_second_ends_the_process(stuck: Start) -> None:
    process = stuck(TRAINS)
    process.send_signal(signal.SIGINT)
    time.sleep(INTERRUPT_REPEAT_S / 4)
    process.send_signal(signal.SIGINT)  # torchrun passes on what ranks got themselves
    process.send_signal(signal.SIGTERM)  # of a launcher that gives up
    time.sleep(INTERRUPT_REPEAT_S + 0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=5)
    assert process.returncode == 130
    assert said == "megalite: warning: asked to end by 2\nmegalite: warning: interrupted at once\n"


def test_a_repeated_sigterm_counts_after_a_while_but_not_under_a_supervisor(stuck: Start) -> None:
    """Which sends it again to ranks that have just been started, and kills them itself."""
    alone, supervised = stuck(TRAINS), stuck(TRAINS + "signals.honors_repeated_signals = False")
    for _ in range(2):
        alone.send_signal(signal.SIGTERM)
        supervised.send_signal(signal.SIGTERM)
        time.sleep(REPEAT_S + 0.1)
    assert alone.wait(5) == 128 + signal.SIGTERM
    assert supervised.poll() is None


def test_a_forked_child_takes_its_own_signals(stuck: Start) -> None:
    """It shares the pipe with its parent, which must not take its child's signal for its own."""
    process = stuck("child = os.fork()\nif not child:\n    os.kill(os.getpid(), 15)\nassert os.wait()[1] == 15")
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130


def test_nohup_is_respected(stuck: Start) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = stuck("")
    finally:
        signal.signal(signal.SIGHUP, previous)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
