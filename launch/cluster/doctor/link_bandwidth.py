"""Measures the bandwidth between hosts, if asked to: an all-reduce over all, and each link of a ring of them.

Input: open connections and the report of a preflight; hosts that failed it are left out. One process per host has each
link to itself, so the figures describe the network, not eight GPUs that share it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from launch.cluster.doctor.bandwidth_rank import PREFIX
from launch.cluster.doctor.findings import STYLES, WARN
from launch.cluster.doctor.preflight import PreflightReport
from launch.cluster.ssh.connection import HostConnection, HostError, in_parallel
from launch.output import Cell, StyledCell, Table
from launch.runtime.import_path import import_variables
from launch.runtime.started_modules import BANDWIDTH_RANK, INSTALLATION, python_command
from megalite.distributed.rank_admission import SECRET, new_secret

LIMIT_S = 90.0
START_S = 10.0  # additional time to start a process and collect its output
OUTLIER = 0.5  # a link slower than this share of the median is marked


@dataclass(frozen=True)
class MeasuredLink:
    """Link from a host to the next one in the hostfile, or from the last to the first."""

    source: str
    target: str
    gigabytes_per_s: float
    latency_us: float
    is_outlier: bool = False  # slower than half the median


@dataclass(frozen=True)
class Links:
    """Result of a measurement; if it failed, `problem` says why and there are no figures."""

    hosts: tuple[str, ...]
    backend: str = ""
    all_reduce_gigabytes_per_s: float = 0.0
    """Bus bandwidth: each host sends 2 (n - 1) / n of the payload in an all-reduce of n hosts."""
    all_reduce_latency_us: float = 0.0
    links: tuple[MeasuredLink, ...] = ()
    seconds: float = 0.0
    problem: str | None = None

    def table(self) -> Table:
        """Builds a table with a row per link, the slow ones marked."""
        rows: list[list[Cell]] = []
        for link in self.links:
            slow = StyledCell("SLOW", STYLES[WARN]) if link.is_outlier else ""
            rows.append([link.source, link.target, f"{link.gigabytes_per_s:.3g}", f"{link.latency_us:.0f}", slow])
        title = f"links, {self.backend}" if self.backend else "links"
        return Table(("from", "to", "GB/s", "latency us", ""), rows, title, text_columns=(0, 1, 4))

    def conclusion(self) -> str:
        """Summarises the bandwidth measurement in one line."""
        if self.problem is not None:
            return f"links were NOT measured: {self.problem}"
        if not self.links:
            return "one host has no links to measure"
        slow = [f"{link.source} to {link.target}" for link in self.links if link.is_outlier]
        speeds = (
            f"all-reduce of {len(self.hosts)} hosts: {self.all_reduce_gigabytes_per_s:.3g} GB/s, "
            f"{self.all_reduce_latency_us:.0f} us ({self.seconds:.1f} s)"
        )
        return f"{speeds}; slower than half the others: {', '.join(slow)}" if slow else speeds


def measure(connections: Mapping[str, HostConnection], report: PreflightReport) -> Links:
    """Runs the measurement on all hosts that passed. Failures on hosts end up in `problem`, never in an exception."""
    began = time.monotonic()
    hosts = tuple(name for name in report.hosts if name in connections and name not in report.failed_hosts)
    if len(hosts) < 2 or hosts[0] not in report.addresses:
        return Links(hosts, problem=None if len(report.hosts) < 2 else "fewer than two hosts can be measured")
    answers: dict[str, dict[str, Any]] = {}
    secret = {SECRET: new_secret()}

    def run(name: str) -> None:
        environment = _environment(report, hosts, name, port) | secret
        command = python_command(BANDWIDTH_RANK, str(LIMIT_S))
        answers[name] = connections[name].ask(
            "run_program",
            timeout_s=LIMIT_S + 2 * START_S,
            command=command,
            environment=environment,
            folder=str(INSTALLATION),
            limit_s=LIMIT_S + START_S,
        )

    try:
        port = connections[hosts[0]].ask("free_port")["port"]
    except HostError as error:
        return Links(hosts, problem=str(error))
    _, failed = in_parallel(hosts, run)
    problems = [str(error) for error in failed.values()]
    problems += [f"host {name}: {_failure(answer)}" for name, answer in answers.items() if answer["code"]]
    if problems:
        return Links(hosts, problem=problems[0], seconds=time.monotonic() - began)
    results = {}
    for name, answer in answers.items():
        line = next(line for line in answer["said"].splitlines() if line.startswith(PREFIX))
        results[name] = json.loads(line.removeprefix(PREFIX))
    return evaluate(hosts, results, time.monotonic() - began)


def evaluate(hosts: tuple[str, ...], results: Mapping[str, Mapping[str, Any]], seconds: float) -> Links:
    """Computes the figures from what each host measured."""
    count, whole = len(hosts), results[hosts[0]]["all_reduce"]
    measured = {name: results[name]["link"] for name in hosts}
    # the small reply takes half a round trip, which is not counted
    transfer_s = {name: max(link["seconds"] - link["latency_s"] / 2, 1e-9) for name, link in measured.items()}
    speeds = {name: link["bytes"] / transfer_s[name] / 1e9 for name, link in measured.items()}
    slow = OUTLIER * median(speeds.values())
    latencies = {name: link["latency_s"] / 2 * 1e6 for name, link in measured.items()}  # of a round trip
    links = tuple(
        MeasuredLink(name, hosts[(place + 1) % count], speeds[name], latencies[name], speeds[name] < slow)
        for place, name in enumerate(hosts)
    )
    sent = 2 * (count - 1) / count * whole["bytes"]
    speed, latency = sent / whole["seconds"] / 1e9, whole["latency_s"] * 1e6
    return Links(hosts, results[hosts[0]]["backend"], speed, latency, links, seconds)


def _environment(report: PreflightReport, hosts: tuple[str, ...], name: str, port: int) -> dict[str, str]:
    variables = {
        "MASTER_ADDR": report.addresses[hosts[0]],
        "MASTER_PORT": str(port),
        "RANK": str(hosts.index(name)),
        "WORLD_SIZE": str(len(hosts)),
        "OMP_NUM_THREADS": "1",
        **import_variables(os.environ),
    }
    own = {address: interface for interface, address in report.facts[name]["interfaces"].items()}
    interface = own.get(report.addresses.get(name, ""))
    if interface is not None:  # else these libraries resolve the host's own name, perhaps to loopback
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return variables


def _failure(answer: Mapping[str, Any]) -> str:
    if answer["code"] < 0:
        return f"it took longer than {LIMIT_S:.0f} s, or was killed (signal {-answer['code']})"
    lines = [line.strip() for line in answer["said"].splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {answer['code']}"
