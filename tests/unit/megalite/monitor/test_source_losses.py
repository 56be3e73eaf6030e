"""Means by source in the records: of all steps since the last entry, also over a restart.

Would catch a step that is left out or told twice, a skipped one that is told, names in another order than the numbers
of micro-batches, and a line of thousands of sources at every step.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megalite.config import Config
from megalite.engine.step_result import Readback, StepResult
from megalite.monitor.source_losses import SourceLossMeans
from megalite.training.state import TrainState


def config_of(tiny: dict[str, Any], interval: int, names: list[str], steps: int = 12) -> Config:
    values = tiny | {"monitor": {"log_interval": interval}, "training": tiny["training"] | {"steps": steps}}
    values["data"] = {"sources": {name: {"path": "unused", "weight": 1} for name in names}}
    return Config.model_validate(values)


def step(*sums: tuple[float, float], taken: bool = True) -> StepResult:
    """The result of a step with (loss, targets) of each source."""
    table = torch.tensor(sums, dtype=torch.float64).t()
    return StepResult(Readback(torch.tensor(1.0), 1.0, False, source_losses=table), refused=not taken)


def test_an_entry_is_the_mean_of_all_steps_since_the_last(tiny: dict[str, Any]) -> None:
    means = SourceLossMeans(config_of(tiny, 3, ["web", "code"], steps=5), {})
    results = [
        step((6.0, 2), (8.0, 1)),  # code, then web: sorted
        step((1e9, 100), (1e9, 100), taken=False),
        step((0.0, 0), (4.0, 3)),
        step((9.0, 3), (0.0, 0)),
        step((1.0, 1), (0.0, 0)),
    ]
    records = []
    for number, result in enumerate(results, start=1):
        means.add(result)
        records.append(means.record(number))
    assert records[:2] == [{}, {}] and records[3] == {}
    assert records[2] == {"source_losses": {"code": 3.0, "web": 3.0}, "source_targets": {"code": 2, "web": 4}}
    assert records[4] == {"source_losses": {"code": 2.5}, "source_targets": {"code": 4}}, "the last step is told"
    assert all(isinstance(count, int) for count in records[2]["source_targets"].values())


@pytest.mark.parametrize("stopped", [1, 3, 4, 5])
def test_a_restart_tells_what_the_uninterrupted_run_tells(tiny: dict[str, Any], stopped: int) -> None:
    """To the bit, through the JSON of a checkpoint."""
    config, draw = config_of(tiny, 3, ["a", "b"]), torch.Generator().manual_seed(1)
    results = [step(*[(float(torch.rand((), generator=draw)), 7.0) for _ in range(2)]) for _ in range(12)]

    def records(means: SourceLossMeans, first: int, last: int) -> list[dict[str, Any]]:
        found = []
        for number in range(first, last + 1):
            means.add(results[number - 1])
            found.append(means.record(number))
        return found

    whole = records(SourceLossMeans(config, {}), 1, 12)
    before = SourceLossMeans(config, {})
    found = records(before, 1, stopped)
    saved = TrainState(step=stopped, source_losses=before.state()).model_dump_json()
    found += records(
        SourceLossMeans(config, TrainState.model_validate(json.loads(saved)).source_losses), stopped + 1, 12
    )
    assert found == whole


def test_many_sources_are_told_rarely(tiny: dict[str, Any]) -> None:
    names = [f"s{place:02}" for place in range(33)]
    means, told = SourceLossMeans(config_of(tiny, 1, names, steps=250), {}), {}
    for number in range(1, 251):
        means.add(step(*[(2.0, 1.0)] * 33))
        told |= {number: record["source_targets"]["s32"]} if (record := means.record(number)) else {}
    assert told == {100: 100, 200: 100, 250: 50}


def test_a_run_on_one_text_tells_nothing(tiny: dict[str, Any]) -> None:
    means = SourceLossMeans(Config.model_validate(tiny), {"web": (1.0, 2)})
    means.add(StepResult(Readback(torch.tensor(1.0), 1.0, False)))
    assert means.record(1) == {} and means.state() == {}
