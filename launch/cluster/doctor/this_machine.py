"""The doctor's look at this machine alone, without a hostfile and without ssh."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from launch.cluster.doctor.findings import Settings
from launch.cluster.doctor.preflight import PreflightReport, preflight
from launch.cluster.ssh.connection import HostConnection
from launch.runtime.devices import cpu_count, gpu_count, why_no_gpu
from launch.runtime.gpu_probe import GPU_ACTIONS
from launch.runtime.host_probe import ACTIONS
from launch.runtime.hostfile import Host
from megalite.config import wanted_world_size

BETWEEN_HOSTS = ("reachable", "clock", "own name")  # checks that say nothing about one machine


class _Here(HostConnection):
    """Answers in this process what hosts answer through ssh."""

    def __init__(self) -> None:
        """Connects to nothing."""

    def ask(self, action: str, *, timeout_s: float = 0.0, **arguments: Any) -> dict[str, Any]:
        return {**ACTIONS, **GPU_ACTIONS}[action](**arguments)


def examine_this_machine(settings: Settings) -> PreflightReport:
    """Checks whether a run, or one rank for each GPU, can train on this machine."""
    config, gpus = settings.layout_of, gpu_count()
    if config is None:
        ranks = gpus or 1
    else:  # of a layout that is still to be chosen, as many as there may be
        ranks = (gpus or cpu_count()) if config.unresolved_options else wanted_world_size(config, gpus or None)
    host = Host(socket.gethostname(), tuple(range(ranks)))
    on_cpu = settings.on_cpu or (not gpus and why_no_gpu() is None)
    report = preflight({host.name: _Here()}, {}, [host], replace(settings, on_cpu=on_cpu))
    is_unknown = settings.run_dir is None
    left_out = (*BETWEEN_HOSTS, "run folder") if is_unknown else BETWEEN_HOSTS
    return replace(report, findings=tuple(one for one in report.findings if one.check not in left_out))
