"""Chooses the network interface of gloo if its default cannot be reached from other hosts.

gloo listens on the address that the host's own name resolves to. Debian writes `127.0.1.1 NAME` into /etc/hosts, and
then other hosts wait for this one until everything times out.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

import psutil

from launch.runtime.rank_environment import Rank

INTERFACE = "GLOO_SOCKET_IFNAME"
DISTANT_ADDRESS = "192.0.2.1"  # reserved for documentation: its route is that to any distant host


def choose_interface(environment: MutableMapping[str, str], rank: Rank) -> None:
    """Names the interface in `environment` unless it is set already or all ranks are on one host (loopback is best)."""
    master, _ = rank.master
    if INTERFACE in environment or rank.has_several_hosts is False or rank.world_size == 1:
        return
    if rank.has_several_hosts is None and master.startswith(("localhost", "127.", "::1")):
        return
    if is_loopback(socket.gethostname()) and (name := interface_to(master)) is not None:
        environment[INTERFACE] = name


def is_loopback(host: str) -> bool:
    """Returns whether `host` resolves to loopback addresses only; true for an unknown name as well."""
    return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))


def interface_to(master: str) -> str | None:
    """Returns the interface on the route to `master`, or to all others if that is this host; None if it is unknown."""
    target = next(
        (address for address in _addresses(master) if not ipaddress.ip_address(address).is_loopback), DISTANT_ADDRESS
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing, but makes the kernel choose the route
            own = {probe.getsockname()[0]}
        except OSError:
            own = set()
    outward = {
        name: {one.address for one in addresses if one.family == socket.AF_INET}
        for name, addresses in psutil.net_if_addrs().items()
    }
    outward = {name: ours for name, ours in outward.items() if any(not a.startswith("127.") for a in ours)}
    found = [name for name, ours in outward.items() if ours & own] or list(outward)
    return found[0] if len(found) == 1 else None


def _addresses(host: str) -> list[str]:
    """Returns the IPv4 addresses of a host; none for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]
