"""Which rank this process is, from the launcher's environment: the one place that reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """This process among those of the job."""

    rank: int
    local_rank: int
    world_size: int


def this_rank() -> Rank | None:
    """The rank that deepspeed's or torchrun's environment gives this process; None outside a launcher."""
    try:
        return Rank(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
    except KeyError:
        return None
