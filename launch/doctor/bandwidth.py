"""How fast hosts reach each other: one process on each measures an all-reduce of all and a ring of neighbours.

In: open connections and the report of a preflight. Out: `Links`. Hosts that failed are left out. One process per host
shares each link with nobody, so figures are of the network, not of what eight GPUs make of it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from launch.doctor.bandwidth_rank import WORD
from launch.doctor.preflight import ROOT, Report
from launch.hosts.connection import HostConnection, HostError, in_parallel

LIMIT_S = 90.0
START_S = 10.0  # more, for a process to be started and collected
OUTLIER = 0.5  # of the median


@dataclass(frozen=True)
class Link:
    """From one host to the next in the hostfile, and from the last to the first."""

    source: str
    target: str
    gigabytes_per_s: float
    latency_us: float
    is_outlier: bool = False  # slower than half the median


@dataclass(frozen=True)
class Links:
    """What was measured; where it could not be, `problem` says why and there are no figures."""

    hosts: tuple[str, ...]
    backend: str = ""
    all_reduce_gigabytes_per_s: float = 0.0
    """What each host sends in an all-reduce, 2 (n - 1) / n of its payload, by the time it takes: as links count."""
    all_reduce_latency_us: float = 0.0
    links: tuple[Link, ...] = ()
    seconds: float = 0.0
    problem: str | None = None


def measure(connections: Mapping[str, HostConnection], report: Report) -> Links:
    """Runs the measurement on all hosts that passed. Never raises for what goes wrong there."""
    began = time.monotonic()
    hosts = tuple(name for name in report.hosts if name in connections and name not in report.failed_hosts)
    if len(hosts) < 2 or hosts[0] not in report.addresses:
        return Links(hosts, problem=None if len(report.hosts) < 2 else "fewer than two hosts can be measured")
    said: dict[str, dict[str, Any]] = {}

    def run(name: str) -> None:
        environment = _environment(report, hosts, name, port)
        command = [sys.executable, "-m", "launch.doctor.bandwidth_rank", str(LIMIT_S)]
        said[name] = connections[name].ask(
            "run_program",
            timeout_s=LIMIT_S + 2 * START_S,
            command=command,
            environment=environment,
            folder=str(ROOT),
            limit_s=LIMIT_S + START_S,
        )

    try:
        port = connections[hosts[0]].ask("free_port")["port"]
    except HostError as error:
        return Links(hosts, problem=str(error))
    _, failed = in_parallel(hosts, run)
    problems = [str(error) for error in failed.values()]
    problems += [f"host {name}: {_last_words(answer)}" for name, answer in said.items() if answer["code"]]
    if problems:
        return Links(hosts, problem=problems[0], seconds=time.monotonic() - began)
    return judge(hosts, {name: _result(answer["said"]) for name, answer in said.items()}, time.monotonic() - began)


def judge(hosts: tuple[str, ...], results: Mapping[str, Mapping[str, Any]], seconds: float) -> Links:
    """Figures of what each host measured."""
    count, whole = len(hosts), results[hosts[0]]["all_reduce"]
    speeds = {name: _speed(results[name]["link"]) for name in hosts}
    slow = OUTLIER * median(speeds.values())
    latencies = {name: results[name]["link"]["latency_s"] / 2 * 1e6 for name in hosts}  # there and back
    links = tuple(
        Link(name, hosts[(place + 1) % count], speeds[name], latencies[name], speeds[name] < slow)
        for place, name in enumerate(hosts)
    )
    sent = 2 * (count - 1) / count * whole["bytes"]
    speed, latency = sent / whole["seconds"] / 1e9, whole["latency_s"] * 1e6
    return Links(hosts, results[hosts[0]]["backend"], speed, latency, links, seconds)


def _speed(link: Mapping[str, float]) -> float:
    """The number that comes back takes half a round trip."""
    return link["bytes"] / max(link["seconds"] - link["latency_s"] / 2, 1e-9) / 1e9


def _environment(report: Report, hosts: tuple[str, ...], name: str, port: int) -> dict[str, str]:
    variables = {
        "MASTER_ADDR": report.addresses[hosts[0]],
        "MASTER_PORT": str(port),
        "RANK": str(hosts.index(name)),
        "WORLD_SIZE": str(len(hosts)),
        "OMP_NUM_THREADS": "1",
    }
    own = {address: interface for interface, address in report.facts[name]["interfaces"].items()}
    interface = own.get(report.addresses.get(name, ""))
    if interface is not None:  # else these libraries go by the host's own name, which may lead to loopback
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return variables


def _result(said: str) -> dict[str, Any]:
    line = next(line for line in said.splitlines() if line.startswith(WORD))
    result: dict[str, Any] = json.loads(line.removeprefix(WORD))
    return result


def _last_words(answer: Mapping[str, Any]) -> str:
    if answer["code"] < 0:
        return f"it took longer than {LIMIT_S:.0f} s, or was killed (signal {-answer['code']})"
    lines = [line.strip() for line in answer["said"].splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {answer['code']}"
