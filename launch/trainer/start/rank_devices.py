"""The devices of a run's ranks as they find them: for the banner, and the check that the run fits their memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from launch.prediction.device_facts import RankDevice, bytes_for_each, ranks_of_hosts
from launch.prediction.memory_check import forecast_memory, refuse_what_cannot_fit
from launch.prediction.this_machine import UNMEASURED, cpu_memory, cpu_name, describe_machine
from launch.runtime.devices import Device, gpu_count
from launch.runtime.host_probe import host_memory_bytes
from launch.runtime.logs import get_logger
from megalite.config import Config, ResolvedLayout
from megalite.planner.cost import memory
from megalite.planner.hardware import Cluster
from megalite.units import plural

log = get_logger(__name__)


def devices_of_ranks(device: Device) -> list[RankDevice]:
    """Returns the device of each rank, in rank order; collective."""
    import torch

    from megalite.distributed.agreement import from_all_ranks
    from megalite.distributed.hosts import this_host

    host, boot = this_host()
    if device == "cpu":
        # torch has chosen, as under torchrun; this says why, or that there is a GPU all the same
        if not torch.distributed.get_rank() and "DS_ACCELERATOR" not in os.environ and (gpus := gpu_count()):
            log.warning(f"the CPU computes, because torch cannot use the {plural(gpus, 'GPU')} that the driver names")
        own = RankDevice(host, boot, cpu_name(), host_memory_bytes(), cpu_memory(os.environ))
    else:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        own = RankDevice(host, boot, found.name, found.total_memory, memory.CUDA)
    return from_all_ranks(own, RankDevice)


def check_memory_of_ranks(
    config: Config, layout: ResolvedLayout, devices: Sequence[RankDevice], *, force: bool
) -> str | None:
    """Returns a warning where the memory of `devices` is nearly full; None where there is room.

    Raises LaunchError where the run cannot fit and is not forced to start: on all ranks alike, since a rank does not
    ask its own environment or CPU.
    """
    ranks, rooms, warnings = ranks_of_hosts(devices), bytes_for_each(devices), []
    for allocator in dict.fromkeys(one.allocator for one in devices):
        alike = [(room, one) for room, one in zip(rooms, devices, strict=True) if one.allocator == allocator]
        _, smallest = min(alike, key=lambda pair: pair[0])  # on a host with little memory for each rank, or a small GPU
        per_host = ranks[smallest.host, smallest.boot]
        forecast = forecast_memory(config, layout, allocator, smallest.memory_bytes, per_host)
        if not force:
            refuse_what_cannot_fit(config, layout, forecast, _this_machine(per_host, len(ranks), allocator), per_host)
        if forecast is not None and forecast.warning is not None:
            warnings.append(forecast.warning)
    return warnings[0] if warnings else None


def _this_machine(ranks: int, nodes: int, allocator: memory.Device) -> Callable[[], Cluster]:
    return lambda: describe_machine(ranks, on_cpu=allocator.kind == "cpu", nodes=nodes, limits=UNMEASURED).cluster


def format_devices(devices: Sequence[RankDevice]) -> str:
    """Returns the devices in words, such as `16 ranks on 2 hosts (NVIDIA H100 80GB HBM3)`."""
    hosts, names = ranks_of_hosts(devices), dict.fromkeys(one.name for one in devices)
    where = devices[0].host if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{plural(len(devices), 'rank')} on {where} ({', '.join(names)})"
