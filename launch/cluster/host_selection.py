"""Selects the hosts of an attempt. Pure functions, except that the placement inspects the model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launch.cluster.doctor.findings import Finding
from launch.cluster.doctor.preflight import PreflightReport
from launch.cluster.placement import place_hosts
from launch.cluster.switch_topology import Topology
from launch.errors import LaunchError
from launch.prediction.auto_layout import hosts_cluster, layout_or_likely, most_ranks, why_fewer
from launch.prediction.memory_check import forecast_memory, refuse_what_cannot_fit
from launch.prediction.this_machine import UNMEASURED, cpu_memory
from launch.runtime.devices import Device
from launch.runtime.hostfile import Host
from megalite.config import Config, ConfigError, ResolvedLayout, resolve_layout
from megalite.planner.cost.memory import CUDA
from megalite.planner.hardware import Cluster
from megalite.planner.search import Ranks
from megalite.units import plural


class NotEnoughHosts(LaunchError):
    """Too few hosts are usable at the moment, which may pass, for example while one boots."""


@dataclass(frozen=True)
class Choice:
    """Hosts in rank order, each with the devices that get a rank, and notices for the user."""

    hosts: tuple[Host, ...]
    layout: ResolvedLayout
    notices: tuple[str, ...]


def expected_device() -> Device:
    """Returns the device to assume for hosts that have not been asked yet."""
    return "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "cuda"


def wanted_ranks(config: Config, hosts: Sequence[Host], spares: int, device: Device) -> int:
    """Returns the number of ranks on these hosts: as many slots as the layout can use, without those of `spares` hosts.

    Raises LaunchError if there are too few slots.
    """
    if spares >= len(hosts):
        raise LaunchError(f"--spares {spares} leaves none of the {len(hosts)} hosts: keep at least one")
    slots = sum(host.slots for host in hosts[: len(hosts) - spares])
    if config.unresolved_options:
        return most_ranks(config, slots, per_node(hosts), device)
    parallel = config.parallel
    replica, data = parallel.ranks_per_replica, parallel.data_parallel_size
    wanted = slots // replica * replica if data == "auto" else replica * data
    if wanted > slots or not wanted:
        count = len(hosts) - spares
        of = f"{plural(count, 'host')}{' that are not spare' if spares else ''}"
        raise LaunchError(
            f"the layout needs {plural(wanted or replica, 'rank')}, more than the {plural(slots, 'slot')} on {of}: "
            "name more hosts, or use a smaller parallel layout"
        )
    return wanted


def likely_layout(config: Config, hosts: Sequence[Host], spares: int) -> tuple[Config, ResolvedLayout, list[str]]:
    """Predicts config, layout and notices before any host is asked.

    Raises LaunchError or ConfigError if there is no layout for these hosts.
    """
    device = expected_device()
    count = wanted_ranks(config, hosts, spares, device)
    likely, layout, later = layout_or_likely(config, Ranks(count, per_node(hosts), device))
    return likely, layout, [*later, *unused_slots(config, hosts, spares, count, device)]


def unused_slots(config: Config, hosts: Sequence[Host], spares: int, ranks: int, device: Device) -> list[str]:
    """Returns notices if a layout that is `auto` can use fewer slots than there are."""
    slots = sum(host.slots for host in hosts[: len(hosts) - spares])
    return why_fewer(config, ranks, slots, per_node(hosts), device)


def per_node(hosts: Sequence[Host]) -> int:
    """Returns the largest number of ranks of which every host has a multiple."""
    return math.gcd(*(host.slots for host in hosts))


def choose_hosts(
    config: Config,
    fit: Sequence[Host],
    device: Device,
    *,
    wanted: int,
    may_shrink: bool,
    spares: int,
    topology: Topology | None,
    why_not: Sequence[Finding],
) -> Choice:
    """Chooses as many of the `fit` hosts, in the hostfile's order, as `wanted` ranks need.

    If they are too few and the layout `may_shrink`, it becomes the largest that fits, provided that data parallelism is
    auto. The last `spares` hosts are used only if others are missing. `why_not` explains what excludes the others.
    Raises NotEnoughHosts if no layout fits these hosts, ConfigError if none fits any.
    """
    slots = sum(host.slots for host in fit)
    layout = resolve_layout(config, wanted, device)
    if slots < wanted:
        can_shrink = may_shrink and config.parallel.data_parallel_size == "auto"
        smaller = _largest_layout(config, device, slots) if can_shrink else None
        if smaller is None:
            reason = ""
            if why_not:
                first = why_not[0]
                is_named = any(f"host {name} " in first.sentence for name in first.hosts)
                text = f"{first.sentence}: {first.remedy}".rstrip(": ") if is_named else str(first)
                reason = f" ({text}{f'; and {len(why_not) - 1} more' if len(why_not) > 1 else ''})"
            needed = f"{plural(wanted, 'rank')} {'is' if wanted == 1 else 'are'} needed"
            raise NotEnoughHosts(
                f"{needed}, and hosts that are fit have {plural(slots, 'slot')}{reason}: mend them, leave them out "
                "with --exclude, or name others in the hostfile"
            )
        layout = smaller
    counts = range(max(1, len(fit) - spares), len(fit))
    enough = (count for count in counts if sum(host.slots for host in fit[:count]) >= layout.world_size)
    hosts, notices = place_hosts(config, layout, fit[: next(enough, len(fit))], topology)
    if layout.world_size < wanted:
        fewer = f"going on with {layout.world_size} ranks instead of {wanted}: data parallelism is auto"
        notices = (fewer, *notices)
    return Choice(hosts, layout, notices)


def address_of_rank_0(hosts: Sequence[Host], interface: str, report: PreflightReport) -> str:
    """Returns the address where rank 0 waits for the others: on a named interface, or else the one that hosts use.

    Raises LaunchError if a host has no such interface with an IPv4 address.
    """
    first = hosts[0].name
    if interface == "auto":
        return report.addresses[first]
    for host in hosts:
        known = report.facts[host.name]["interfaces"]
        if interface not in known:
            raise LaunchError(
                f"launch.interface is {interface}, and {host.name} has no address on one of this name: it has "
                f"{', '.join(known)}"
            )
    return str(report.facts[first]["interfaces"][interface])


def check_memory_of_hosts(
    config: Config,
    choice: Choice,
    facts: Mapping[str, Mapping[str, Any]],
    device: Device,
    environment: Mapping[str, str],
) -> None:
    """Raises LaunchError where the run cannot fit the memory of the hosts.

    `facts` are the host probe's, `environment` the variables that ranks will have.
    """
    slots = [host.slots for host in choice.hosts]
    gpus = [name for host in choice.hosts for name in facts[host.name]["gpus"]]

    def machine() -> Cluster:
        return hosts_cluster(slots, choice.layout.world_size, device, gpus, UNMEASURED)

    if device == "cpu":
        smallest = min(choice.hosts, key=lambda host: facts[host.name]["memory_bytes"] / host.slots)
        asked = facts[smallest.name]
        available, ranks = asked["memory_bytes"], smallest.slots
        allocator = cpu_memory(environment, asked["has_bf16_units"])
    elif sizes := [size for host in choice.hosts for size in _gpu_sizes(host, facts[host.name])]:
        available, ranks, allocator = min(sizes), 1, CUDA
    else:
        try:
            available, ranks, allocator = machine().memory_bytes, 1, CUDA
        except (ConfigError, LaunchError):  # the catalogue does not know them: the ranks look for themselves
            return
    forecast = forecast_memory(config, choice.layout, allocator, available, ranks)
    refuse_what_cannot_fit(config, choice.layout, forecast, machine, ranks)


def _gpu_sizes(host: Host, facts: Mapping[str, Any]) -> list[int]:
    """Returns the bytes of memory of the GPUs that get a rank, as far as the driver of the host tells them."""
    known = dict(enumerate(facts["gpu_memory_bytes"]))
    return [size for device in host.devices if (size := known.get(device)) is not None]


def _largest_layout(config: Config, device: Device, slots: int) -> ResolvedLayout | None:
    """Returns the largest layout on `slots` slots that divides the batch evenly; None if there is none."""
    replica = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    for replicas in range(slots // replica, 0, -1):
        with suppress(ConfigError):
            return resolve_layout(config, replicas * replica, device)
    return None
