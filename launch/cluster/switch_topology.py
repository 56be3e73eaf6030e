"""Parses Slurm's topology.conf, or the output of `scontrol show topology`, into the switches above each host.

Input: text such as `SwitchName=leaf1 Nodes=node[1-4]` and `SwitchName=spine Switches=leaf[1-2]`, which can be written
without Slurm too. Output: for each host the switches above it, from its leaf to the root.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from launch.errors import LaunchError

LARGEST_RANGE = 100_000  # hosts of one name with brackets; more is a typing error
KINDS = {"switchname": "SwitchName", "blockname": "BlockName"}  # a block is a leaf: hosts that share a faster network


@dataclass(frozen=True)
class Topology:
    """Forest of switches."""

    paths: Mapping[str, tuple[str, ...]]  # host -> the switches above it, its leaf first

    def path(self, host: str) -> tuple[str, ...]:
        """Returns the switches above `host`, found by its name with or without the domain; empty if it is unknown."""
        return self.paths.get(host) or self.paths.get(host.partition(".")[0], ())


@dataclass
class _Switch:
    where: str  # file and line
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    parent: str | None = None


def read_topology(path: Path) -> Topology:
    """Reads a topology file. Raises LaunchError with the line number if it is malformed."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(
            f"topology {path} cannot be read: {reason}: give Slurm's topology.conf, or the output of `scontrol show "
            "topology`"
        ) from None
    return parse_topology(text, str(path))


def parse_topology(text: str, source: str) -> Topology:
    """Parses a topology; `source` names it in errors. Raises LaunchError with the line number if it is malformed."""
    switches: dict[str, _Switch] = {}
    for where, line in _lines(text, source):
        options = {}
        for option in line.split():
            key, equals, value = option.partition("=")
            if not equals or not value:
                raise LaunchError(f"{where}: {option!r} is not NAME=VALUE: correct it")
            options[key.lower()] = value
        kind = next((kind for kind in KINDS if kind in options), None)
        if kind is None:
            if "blocksizes" in options:
                continue
            raise LaunchError(f"{where}: {line.split()[0]!r} is not SwitchName=NAME: correct it")
        name = options[kind]
        if name in switches:
            raise LaunchError(f"{where}: {name} is already in {switches[name].where}: keep one of them")
        below = tuple(expand_hosts(options.get("switches", ""), where))
        # scontrol lists the hosts of all leaves beside the switches that lead to them
        nodes = () if below else tuple(expand_hosts(options.get("nodes", ""), where))
        if not below and not nodes:
            raise LaunchError(f"{where}: {name} has neither Nodes= nor Switches=: say what hangs on it")
        switches[name] = _Switch(where, nodes, below)
    if not switches:
        raise LaunchError(f"{source} names no switch: add lines such as `SwitchName=leaf1 Nodes=node[1-4]`")
    return Topology(_paths(switches))


def expand_hosts(hosts: str, where: str) -> Iterator[str]:
    """Expands a Slurm host list: `node[1-3,7],gpu[01-02]` -> node1 node2 node3 node7 gpu01 gpu02."""
    for part in re.findall(r"(?:\[[^]]*\]|[^,\[])+|\[", hosts):
        texts = re.split(r"\[([^]]*)\]", part)  # outside and inside of brackets, in turn
        if "[" in "".join(texts[::2]) or "]" in "".join(texts[::2]):
            raise LaunchError(f"{where}: {hosts!r} has a bracket without its partner: correct it")
        inside = [[text] if place % 2 == 0 else list(_numbers(text, hosts, where)) for place, text in enumerate(texts)]
        if prod(map(len, inside)) > LARGEST_RANGE:
            raise _too_many(part, hosts, where)
        yield from map("".join, itertools.product(*inside))


def _numbers(text: str, hosts: str, where: str) -> Iterator[str]:
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise LaunchError(f"{where}: {part!r} in {hosts!r} is not a number or a range such as 1-4: correct it")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise LaunchError(f"{where}: {part!r} in {hosts!r} is not a range from small to large: correct it")
        if int(last) - int(first) >= LARGEST_RANGE:
            raise _too_many(part, hosts, where)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _too_many(part: str, hosts: str, where: str) -> LaunchError:
    return LaunchError(
        f"{where}: {part!r} in {hosts!r} is longer than any cluster: give at most {LARGEST_RANGE:,} hosts"
    )


def _lines(text: str, source: str) -> Iterator[tuple[str, str]]:
    """Yields position and text of each line that is not empty; a backslash at the end continues it."""
    begun, kept = 0, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        begun = begun if kept else number
        kept += line.partition("#")[0].strip()
        if kept.endswith("\\"):
            kept = kept[:-1].rstrip() + " "
            continue
        if kept.strip():
            yield f"{source}:{begun}", kept.strip()
        kept = ""


def _paths(switches: dict[str, _Switch]) -> dict[str, tuple[str, ...]]:
    """Returns the switches above each host. Raises LaunchError if the switches are not a forest."""
    for name, switch in switches.items():
        for child in switch.switches:
            if child not in switches:
                raise LaunchError(f"{switch.where}: switch {child} below {name} is not in the file: add or correct it")
            if switches[child].parent is not None:
                raise LaunchError(
                    f"{switch.where}: switch {child} is below {switches[child].parent} and {name}: keep one of them"
                )
            switches[child].parent = name
    paths: dict[str, tuple[str, ...]] = {}
    for name, switch in switches.items():
        path, above = [name], switch.parent
        while above is not None:
            if above in path:
                raise LaunchError(f"{switch.where}: switch {above} is above itself: correct it")
            path.append(above)
            above = switches[above].parent
        for node in switch.nodes:
            if node in paths:
                raise LaunchError(f"{switch.where}: host {node} is below {paths[node][0]} and {name}: keep one of them")
            paths[node] = tuple(path)
    return paths
