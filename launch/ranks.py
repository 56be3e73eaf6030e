"""Which rank this process is, from the launcher's environment: the one place that reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from launch.errors import LaunchError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Rank:
    """This process among those of the job."""

    rank: int
    local_rank: int
    world_size: int


def this_rank() -> Rank | None:
    """The rank that deepspeed's or torchrun's environment gives this process; None outside a launcher."""
    if not all(name in os.environ for name in VARIABLES):
        return None
    for name in VARIABLES:
        if not os.environ[name].isdecimal():
            raise LaunchError(f"environment variable {name} is {os.environ[name]!r}, not a whole number: unset it")
    return Rank(*(int(os.environ[name]) for name in VARIABLES))
