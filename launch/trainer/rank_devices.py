"""The devices of a run's ranks as they find them: for the banner, and the check that the run fits their memory."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launch.planning.memory_check import forecast_memory, refuse_what_cannot_fit
from launch.planning.this_machine import MeasurementLimits, cpu_name, describe_machine
from launch.runtime.devices import Device, host_memory_bytes
from launch.trainer.prediction_tracker import cpu_memory
from megalite.config import Config, ResolvedLayout
from megalite.planner.cost.memory import CUDA

UNMEASURED = MeasurementLimits(timeout_s=0.0, allow_typical=True)  # memory alone counts: no CPU need be measured for it


@dataclass(frozen=True)
class RankDevice:
    """The device of one rank."""

    host: str
    name: str  # of the GPU or the CPU
    memory_bytes: int  # of the GPU, or of all of the host


def devices_of_ranks(device: Device) -> list[RankDevice]:
    """Returns the device of each rank, in rank order; collective."""
    import torch

    from megalite.engine.distributed import from_all_ranks

    if device == "cpu":
        return from_all_ranks(RankDevice(platform.node(), cpu_name(), host_memory_bytes()))
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return from_all_ranks(RankDevice(platform.node(), found.name, found.total_memory))


def check_memory_of_ranks(
    config: Config, layout: ResolvedLayout, devices: Sequence[RankDevice], device: Device, *, force: bool
) -> str | None:
    """Returns a warning where the memory of `devices` is nearly full; None where there is room.

    Raises LaunchError, on all ranks alike, where the run cannot fit and is not forced to start.
    """
    on_cpu = device == "cpu"
    ranks = Counter(one.host for one in devices)
    # the host with least memory for each of its ranks, or the smallest GPU
    smallest = min(devices, key=lambda one: one.memory_bytes / (ranks[one.host] if on_cpu else 1))
    forecast = forecast_memory(
        config, layout, cpu_memory(os.environ) if on_cpu else CUDA, smallest.memory_bytes, ranks[smallest.host]
    )
    if not force:
        per_host, hosts = ranks[smallest.host], len(ranks)
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
    hosts, names = dict.fromkeys(one.host for one in devices), dict.fromkeys(one.name for one in devices)
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{len(devices)} rank{'s' * (len(devices) > 1)} on {where} ({', '.join(names)})"
