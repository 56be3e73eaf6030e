"""How a session ends: what is written down, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.trainer import building
from launch.trainer.building import BuiltRun


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
    context: Any = SimpleNamespace(checkpoints=SimpleNamespace(wait=lambda: 0.5))
    built = BuiltRun(*[cast(Any, part) for part in (None, None, None, context, run_log, None, None)])
    monkeypatch.setattr(building, "memory_of_ranks", lambda engine, own: [own])
    built.log_end("ended")
    assert run_log.told == [("ended", 0.5), [{"peak_mib": 1.0}]]
    monkeypatch.setattr(building, "memory_of_ranks", gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        built.log_end("preempted")
    assert run_log.told[2:] == [("preempted", 0.5)]
