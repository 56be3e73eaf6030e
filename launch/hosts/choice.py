"""Which hosts an attempt takes. Pure, but for the placement's look at the model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from launch.devices import Device
from launch.doctor.findings import Finding
from launch.errors import LaunchError
from launch.hostfile import Host
from launch.placement import place_hosts
from launch.plan.automatic import most_ranks, why_fewer
from launch.topology import Topology
from megalite.config import Config, ConfigError, ResolvedLayout


class NotEnoughHosts(LaunchError):
    """One sentence; it may pass, as when a host boots."""


@dataclass(frozen=True)
class Choice:
    """Hosts in rank order, each with the devices that get a rank, and what is to be told about them."""

    hosts: tuple[Host, ...]
    layout: ResolvedLayout
    notices: tuple[str, ...]


def expected_device() -> Device:
    """Of ranks on hosts that were not asked yet."""
    return "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "cuda"


def wanted_ranks(config: Config, hosts: Sequence[Host], spares: int, device: Device) -> int:
    """Ranks of a run on these hosts: all slots but those of `spares` hosts, as far as the layout can use them.

    Raises LaunchError where they are too few.
    """
    if spares >= len(hosts):
        raise LaunchError(f"--spares {spares} leaves none of the {len(hosts)} hosts: keep at least one")
    slots = _slots(hosts, spares)
    if config.open:
        return most_ranks(config, slots, per_node(hosts), device)
    replica, data = _replica(config), config.parallel.data_parallel_size
    wanted = slots // replica * replica if data == "auto" else replica * data
    if wanted > slots or not wanted:
        count = len(hosts) - spares
        of = f"{count} host{'s' * (count > 1)}{' that are not spare' if spares else ''}"
        raise LaunchError(
            f"the layout needs {wanted or replica} ranks, and there are {slots} slots on {of}: name more hosts, or use "
            "a smaller parallel layout"
        )
    return wanted


def unused_slots(config: Config, hosts: Sequence[Host], spares: int, ranks: int, device: Device) -> list[str]:
    """What to tell where a layout that is `auto` can use fewer slots than there are."""
    return why_fewer(config, ranks, _slots(hosts, spares), per_node(hosts), device)


def per_node(hosts: Sequence[Host]) -> int:
    """Ranks that every one of them holds a multiple of."""
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
    """Of the hosts that are `fit`, in the hostfile's order, as many as `wanted` ranks need.

    Where they are too few and it `may_shrink`, the largest layout that they hold, if data parallelism is auto.
    The last `spares` are taken only where others are lacking. `why_not`: what keeps the others out. Raises
    NotEnoughHosts where there is no layout for them, ConfigError where there never was.
    """
    there = sum(host.slots for host in fit)
    layout = config.check_world(wanted, device)
    if there < wanted:
        smaller = _smaller(config, device, there) if may_shrink else None
        if smaller is None:
            told = f" ({_first_of(why_not)})" if why_not else ""
            raise NotEnoughHosts(
                f"{wanted} ranks are needed, and hosts that are fit have {there} slots{told}: mend them, leave them "
                "out with --exclude, or name others in the hostfile"
            )
        layout = smaller
    hosts, notices = place_hosts(config, layout, _candidates(fit, layout.world_size, spares), topology)
    if layout.world_size < wanted:
        fewer = f"going on with {layout.world_size} ranks instead of {wanted}: data parallelism is auto"
        notices = (fewer, *notices)
    return Choice(hosts, layout, notices)


def _smaller(config: Config, device: Device, slots: int) -> ResolvedLayout | None:
    """The largest layout on so many slots, with which the batch can be cut evenly."""
    if config.parallel.data_parallel_size != "auto":
        return None
    replica = _replica(config)
    for replicas in range(slots // replica, 0, -1):
        try:
            return config.check_world(replicas * replica, device)
        except ConfigError:
            continue
    return None


def _candidates(fit: Sequence[Host], world_size: int, spares: int) -> Sequence[Host]:
    for count in range(max(1, len(fit) - spares), len(fit)):
        if sum(host.slots for host in fit[:count]) >= world_size:
            return fit[:count]
    return fit


def _slots(hosts: Sequence[Host], spares: int) -> int:
    return sum(host.slots for host in hosts[: len(hosts) - spares])


def _replica(config: Config) -> int:
    return config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size


def _first_of(failures: Sequence[Finding]) -> str:
    """One of them in words, and how many there are besides."""
    first = failures[0]
    named = any(f"host {name} " in first.sentence for name in first.hosts)
    text = f"{first.sentence}: {first.remedy}".rstrip(": ") if named else str(first)
    return f"{text}; and {len(failures) - 1} more" if len(failures) > 1 else text
