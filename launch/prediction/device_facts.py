"""Facts of the device of each rank of a run, by which a layout is chosen and memory is checked. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.planner.cost.memory import Device


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank."""

    host: str
    boot: str  # of its kernel: hosts may have the same name
    name: str  # of the GPU or the CPU
    memory_bytes: int  # of the GPU, or of all of the host
    allocator: Device  # which depends on the CPU of the rank and on its environment


def ranks_of_hosts(devices: Sequence[RankDevice]) -> Counter[tuple[str, str]]:
    """Returns the number of ranks of each host, by its name and boot."""
    return Counter((one.host, one.boot) for one in devices)


def bytes_for_each(devices: Sequence[RankDevice]) -> list[float]:
    """Returns the memory for each rank: that of its GPU, or its share of the host's."""
    ranks = ranks_of_hosts(devices)
    return [one.memory_bytes / (ranks[one.host, one.boot] if one.allocator.kind == "cpu" else 1) for one in devices]


def most_demanding_allocator(devices: Sequence[RankDevice]) -> Device:
    """Returns an allocator with which each rank needs as much memory as with its own, or more."""
    allocators = [one.allocator for one in devices]
    return replace(
        allocators[0],
        keeps_freed=any(one.keeps_freed for one in allocators),
        widens_bf16=any(one.widens_bf16 for one in allocators),
    )
