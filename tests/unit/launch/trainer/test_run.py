"""How a session ends: what is written down, and in which order."""

from __future__ import annotations

from typing import Any, cast

import pytest

import launch.train as job
from launch.trainer.run_logger import RunLogger


class RunLog:
    """A run_logger that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.prediction = self

    def memory(self) -> dict[str, float]:
        return {"peak_mib": 1.0}

    def on_end(self, ending: str, *, save_blocked_s: float) -> None:
        self.told.append((ending, save_blocked_s))

    def log_prediction_error(self, memory: Any) -> None:
        self.told.append(memory)


def test_the_end_is_written_down_before_all_ranks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be gone: goodput has lost nothing then."""

    def gone(*_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    run_log = RunLog()
    monkeypatch.setattr(job, "memory_of_ranks", lambda engine, own: [own])
    job._end(cast(Any, None), cast(RunLogger, run_log), "ended", 0.5)
    assert run_log.told == [("ended", 0.5), [{"peak_mib": 1.0}]]
    monkeypatch.setattr(job, "memory_of_ranks", gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        job._end(cast(Any, None), cast(RunLogger, run_log), "preempted", 0.0)
    assert run_log.told[2:] == [("preempted", 0.0)]
