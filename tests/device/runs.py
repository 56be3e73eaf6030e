"""Runs on devices that are not there, and what their steps have asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.device.counts import Counts, counts_now
from tests.helpers.warm_runs import Fault, session

STEPS = 6
WARM = 4  # the step that is counted, from 0: caches are full, and the step before it has been read


def steps_of(
    folder: Path, config: dict[str, Any], *, world_size: int = 1, environment: Mapping[str, str] | None = None
) -> list[Counts]:
    """Trains to the run's good end; what a warm step has asked the device of each rank for.

    A step is from the beginning of one to that of the next, so what the loop does between them counts.
    """
    config = config | {"training": config["training"] | {"steps": STEPS}}
    train(folder, config, world_size=world_size, fault=(write_counts, (dict(environment or {}),)))
    return [_warm_step(folder / f"counts_{rank}.json") for rank in range(world_size)]


def train(folder: Path, config: dict[str, Any], *, world_size: int, fault: Fault) -> str:
    """A run to its good end; what its ranks have said."""
    with session(folder, config, world_size=world_size, fault=fault) as running:
        assert running.wait() == [0] * world_size, running.output()
        return running.output()


def _warm_step(path: Path) -> Counts:
    begins = [Counts(*counts) for counts in json.loads(path.read_text())]
    assert len(begins) == STEPS
    return begins[WARM + 1] - begins[WARM]


def write_counts(folder: Path, rank: int, environment: dict[str, str]) -> None:
    """Prepares a rank: `environment` is the stand-in's; the counts at the beginning of each step go to `folder`."""
    os.environ.update(environment)
    from megalite.engine.engine import Engine

    begins: list[tuple[int, ...]] = []
    train_step = Engine.train_step

    def counted(self: Engine, *arguments: Any, **options: Any) -> Any:
        begins.append(astuple(counts_now()))
        (folder / f"counts_{rank}.json").write_text(json.dumps(begins))
        return train_step(self, *arguments, **options)

    patch.object(Engine, "train_step", counted).start()


def with_sections(config: dict[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A test's config with other options, in bf16 and with blocks that are not compiled unless these say otherwise."""
    base = config | {"precision": {"dtype": "bf16"}, "performance": {"compile": "none"}}
    return base | {name: {**base.get(name, {}), **section} for name, section in sections.items()}
