"""How a session ends: what is written down, and in which order."""

from __future__ import annotations

from typing import Any, cast

import pytest

from launch import job
from launch.reporter import Reporter


class Voice:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.own_run = self

    def memory(self) -> dict[str, float]:
        return {"peak_mib": 1.0}

    def ends(self, event: str, untold_s: float) -> None:
        self.told.append((event, untold_s))

    def compares(self, memory: Any) -> None:
        self.told.append(memory)


def test_the_end_is_written_down_before_all_ranks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may be gone: goodput has lost nothing then."""

    def gone(*_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    voice = Voice()
    monkeypatch.setattr(job, "memory_of_ranks", lambda engine, own: [own])
    job._end(cast(Any, None), cast(Reporter, voice), "ended", 0.5)
    assert voice.told == [("ended", 0.5), [{"peak_mib": 1.0}]]
    monkeypatch.setattr(job, "memory_of_ranks", gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        job._end(cast(Any, None), cast(Reporter, voice), "preempted", 0.0)
    assert voice.told[2:] == [("preempted", 0.0)]
