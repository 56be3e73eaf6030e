"""Runs that nothing happens to, to hold others against."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.warm_runs import session


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run of one session."""

    run_dir: Path
    seconds: float  # from the start of its ranks to their end


class References:
    """Runs each config once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Reference] = {}

    def of(self, config: dict[str, Any], world_size: int = 2) -> Reference:
        """The uninterrupted run of a config, whatever its `run_dir`."""
        key = json.dumps(config | {"run_dir": ""}, sort_keys=True)
        if key not in self._done:
            folder = self._folder / str(len(self._done))
            with session(folder, config | {"run_dir": str(folder / "run")}, world_size=world_size) as running:
                assert running.wait() == [0] * world_size, running.output()
                seconds = time.monotonic() - running.began
            self._done[key] = Reference(folder / "run", seconds)
        return self._done[key]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Shared by all tests that compare with the same run."""
    return References(tmp_path_factory.mktemp("references"))
