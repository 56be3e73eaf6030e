"""A request to stop during a long step: what the run says until the step ends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from launch.runtime.logs import configure_logging
from megalite.resilience import stop_requests
from tests.helpers.rank_pool import run_fresh_ranks


def _stopped_in_a_long_step(rank: int) -> tuple[str, str]:
    configure_logging()
    stop_requests.SILENCE_S = 0.1
    patch = pytest.MonkeyPatch()
    said: list[str] = []
    patch.setattr(stop_requests.log, "info", said.append)
    with stop_requests.StopRequests(None, 0.0) as requests:
        requests.begin_step(7, saved_step=lambda: 2)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        stop = requests.agree(save_next=False).stop
        time.sleep(0.3)
        count = len(said)
        time.sleep(0.3)
    assert stop is not None
    assert len(said) == count, "the step has ended"
    return said[0], stop.reason


def test_a_long_last_step_is_told_again() -> None:
    ((said, reason),) = run_fresh_ranks(_stopped_in_a_long_step, 1)
    assert said.startswith("step 7 still goes on (") and reason == "signal SIGTERM"
