"""Metrics sinks of rank 0, one file each.

To add one, put a module into this folder with a function `open_sink(config, first_step)` that returns an `Observer`, or
None where the config does not ask for it; `first_step` is the number of steps done before this session.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module

from megalite.config import Config
from megalite.monitor.observer import Observer

REQUIRED = "jsonl"  # first: a step that the console shows is on disk; and a run without metrics.jsonl may not start


def open_sinks(
    config: Config, first_step: int, nonfatal: Callable[[str], AbstractContextManager[None]]
) -> list[Observer]:
    """Opens all sinks that the config asks for. What fails inside `nonfatal`, given the sink's name, is left out."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {REQUIRED})
    sinks: list[Observer] = [import_module(f"{__name__}.{REQUIRED}").open_sink(config, first_step)]
    for name in names:
        with nonfatal(name):
            sink = import_module(f"{__name__}.{name}").open_sink(config, first_step)
            if sink is not None:
                sinks.append(sink)
    return sinks
