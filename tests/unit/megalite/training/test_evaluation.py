"""How an evaluation is cut into parts, with a clock that a test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalite.training import evaluation


@pytest.mark.parametrize(
    ("stages", "each_s", "sets", "most"),
    [(1, 0.01, 3, 1.01), (1, 5.0, 2, 1.0), (8, 0.05, 1, 1.26), (8, 0.5, 1, 1.26), (16, 0.2, 2, 1.26)],
)
def test_parts_cost_little_and_all_are_counted(
    stages: int, each_s: float, sets: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short part of a long pipeline takes longer for each micro-batch, from which a still shorter one would follow:
    the evaluation took thirteen times as long. Micro-batches of a set that is done were not counted."""
    clock, parts = SimpleNamespace(now=0.0), list[int]()
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(evaluation, "SILENCE_S", float("inf"))
    activity = SimpleNamespace(record_op=lambda *_, **__: None, peers=SimpleNamespace(everyone=()))
    mesh, device = SimpleNamespace(pipeline_parallel_size=stages), SimpleNamespace(type="cpu")
    engine = SimpleNamespace(deepspeed=SimpleNamespace(device=device), mesh=mesh, activity=activity)
    count = 512
    pace = evaluation._Pace(
        cast(Any, engine), cast(Any, SimpleNamespace(agree_on_part=lambda part: part)), 1, sets * count
    )
    for _ in range(sets):
        done, part = 0, stages  # as `Engine.evaluate` does
        while done < count:
            part = min(part, count - done)
            clock.now += each_s * (part + stages - 1)
            parts.append(part)
            done += part
            part = pace.next_part(part)
    assert pace._done == sum(parts) == sets * count
    assert clock.now <= most * sets * each_s * (count + stages - 1)
    longest_s = each_s * (max(parts) + stages - 1)
    assert longest_s <= max(1.3 * evaluation.PART_S, each_s * (5 * (stages - 1) + 1))
