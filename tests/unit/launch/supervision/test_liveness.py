"""The thread that watches heartbeats survives whatever it reads, and says once what it cannot do."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from launch.supervision import liveness
from launch.supervision.liveness import HeartbeatMonitor
from megalite.resilience.heartbeat import FOLDER, Beat

HERE = socket.gethostname()
PLANTED: dict[str, Callable[[Path], object]] = {
    "a word as process": lambda path: path.write_text(
        json.dumps(asdict(Beat("a1", 3, HERE, 1, 1, 0)) | {"process": "x"})
    ),
    "a huge process": lambda path: path.write_text(json.dumps(asdict(Beat("a1", 3, HERE, 10**30, 1, 0)))),
    "a rank too many": lambda path: path.write_text(json.dumps(asdict(Beat("a1", 3, "h", 1, 1, 0)))),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_heartbeats_neither_end_the_attempt_nor_blind_the_monitor(tmp_path: Path, what: str) -> None:
    (tmp_path / FOLDER).mkdir()
    PLANTED[what](tmp_path / FOLDER / "beat_0003.json")
    with HeartbeatMonitor(tmp_path, "a1", 0.4, world_size=2) as monitor:
        time.sleep(1.0)
        assert monitor.reason() is None
        real = Beat("a1", 1, HERE, os.getpid(), 1, 7)  # and then gives no sign of life
        (tmp_path / FOLDER / "beat_0001.json").write_text(json.dumps(asdict(real)))
        deadline = time.monotonic() + 10.0
        while monitor.reason() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (
            monitor.reason()
            == f"rank 1 on {HERE} (process {os.getpid()}, in step 7) has given no sign of life for 0.4 s"
        )


def test_an_error_of_ours_is_told_once_and_the_thread_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(*_: object) -> list[Beat]:
        calls.append(1)
        raise OverflowError("signed integer is greater than maximum")

    monkeypatch.setattr(liveness.StaleHeartbeats, "silent", fail)
    with caplog.at_level(logging.WARNING, "launch"), HeartbeatMonitor(tmp_path, "a1", 0.2) as monitor:
        deadline = time.monotonic() + 10.0
        while len(calls) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert monitor.reason() is None
    (told,) = [record.message for record in caplog.records if "heartbeats" in record.message]
    assert len(calls) >= 5 and "OverflowError" in told and "tried again" in told
