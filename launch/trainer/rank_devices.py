"""The devices of a run's ranks as they find them: for the banner, and the check that the run fits their memory."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.planning.memory_check import forecast_memory, refuse_what_cannot_fit
from launch.planning.this_machine import UNMEASURED, cpu_memory, cpu_name, describe_machine
from launch.runtime.devices import Device
from launch.runtime.host_probe import host_memory_bytes
from megalite.config import Config, ResolvedLayout
from megalite.planner.cost.memory import CUDA
from megalite.planner.units import plural

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank."""

    host: str
    boot: str  # of its kernel: hosts may have the same name
    name: str  # of the GPU or the CPU
    memory_bytes: int  # of the GPU, or of all of the host


def devices_of_ranks(device: Device) -> list[RankDevice]:
    """Returns the device of each rank, in rank order; collective."""
    import torch

    from megalite.engine.distributed import from_all_ranks

    host, boot = platform.node(), ""
    with suppress(OSError):
        boot = BOOT_ID.read_text()
    if device == "cpu":
        return from_all_ranks(RankDevice(host, boot, cpu_name(), host_memory_bytes()))
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return from_all_ranks(RankDevice(host, boot, found.name, found.total_memory))


def check_memory_of_ranks(
    config: Config, layout: ResolvedLayout, devices: Sequence[RankDevice], device: Device, *, force: bool
) -> str | None:
    """Returns a warning where the memory of `devices` is nearly full; None where there is room.

    Raises LaunchError, on all ranks alike, where the run cannot fit and is not forced to start.
    """
    on_cpu = device == "cpu"
    ranks = Counter((one.host, one.boot) for one in devices)

    def room(one: RankDevice) -> float:
        return one.memory_bytes / (ranks[one.host, one.boot] if on_cpu else 1)

    smallest = min(devices, key=room)  # of a host with little memory for each of its ranks, or the smallest GPU
    per_host, hosts = ranks[smallest.host, smallest.boot], len(ranks)
    allocator = cpu_memory(os.environ) if on_cpu else CUDA
    forecast = forecast_memory(config, layout, allocator, smallest.memory_bytes, per_host)
    if not force:
        refuse_what_cannot_fit(
            config,
            layout,
            forecast,
            lambda: describe_machine(per_host, on_cpu=on_cpu, nodes=hosts, limits=UNMEASURED).cluster,
            per_host,
        )
    return forecast.warning if forecast is not None else None


def devices_in_words(devices: Sequence[RankDevice]) -> str:
    """Returns the devices in words, such as `16 ranks on 2 hosts (NVIDIA H100 80GB HBM3)`."""
    hosts, names = {(one.host, one.boot) for one in devices}, dict.fromkeys(one.name for one in devices)
    where = devices[0].host if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{plural(len(devices), 'rank')} on {where} ({', '.join(names)})"
