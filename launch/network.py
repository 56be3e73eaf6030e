"""Which network interface gloo uses, where it would take one that other hosts cannot reach.

gloo listens on the address that the host's own name stands for. Debian writes `127.0.1.1 NAME` into /etc/hosts: then
other hosts wait for this one until everything times out.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

import psutil

from launch.rank_environment import Rank

INTERFACE = "GLOO_SOCKET_IFNAME"
ELSEWHERE = "192.0.2.1"  # reserved for documentation: the way to it is the way to any far host


def choose_interface(environment: MutableMapping[str, str], rank: Rank) -> None:
    """Names the interface in `environment`, unless that is done, or not needed: on one host loopback is the best."""
    master, _ = rank.master
    if INTERFACE in environment or rank.has_several_hosts is False or rank.world_size == 1:
        return
    if rank.has_several_hosts is None and master.startswith(("localhost", "127.", "::1")):
        return
    if is_loopback(socket.gethostname()) and (name := interface_to(master)) is not None:
        environment[INTERFACE] = name


def is_loopback(host: str) -> bool:
    """Whether `host` stands for no address but those that only this machine reaches; so does an unknown name."""
    return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))


def interface_to(master: str) -> str | None:
    """The interface with the way to `master`, or where that is this host to all others; None where it is not known."""
    way = next((address for address in _addresses(master) if not ipaddress.ip_address(address).is_loopback), ELSEWHERE)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((way, 9))  # sends nothing, but asks the kernel for the way
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
    """IPv4 addresses; none for a name that nobody knows."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]
