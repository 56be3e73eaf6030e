"""What `megalite launch` shows: the hosts as the doctor sees them, and what a dry run would start."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from launch.backends.deepspeed import Meeting, command_of
from launch.devices import Device
from launch.doctor.findings import Verdict
from launch.doctor.preflight import Report
from launch.doctor.report import conclusion
from launch.hostfile import Host
from launch.hosts.choice import wanted_ranks
from launch.hosts.supervisor import FOLDER, Options
from launch.placement import place_hosts
from megalite.config import Config, ResolvedLayout


def show(report: Report) -> None:
    """On stderr: one line, and one for each thing that is not as it should be."""
    print(f"megalite: {conclusion(report)}", file=sys.stderr, flush=True)
    for finding in report.findings:
        if finding.verdict != Verdict.OK:
            print(f"megalite: {finding.verdict.lower()}: {finding.check}: {finding}", file=sys.stderr, flush=True)


def expected_layout(config: Config, hosts: Sequence[Host], spares: int) -> ResolvedLayout:
    """What can be told of the layout before a host is asked. Raises LaunchError or ConfigError where it cannot be."""
    device: Device = "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "cuda"
    return config.check_world(wanted_ranks(config, hosts, spares), device)


def describe(config: Config, hosts: Sequence[Host], options: Options, *, as_json: bool) -> None:
    """The dry run: which hosts, in rank order, and the command; no host is asked anything."""
    main = hosts[: len(hosts) - options.spares]
    layout = expected_layout(config, hosts, options.spares)
    placed, notices = place_hosts(config, layout, main, options.topology)
    used = {host.name for host in placed}
    spares = [host.name for host in hosts if host.name not in used]
    folder = (config.run_dir / FOLDER).absolute()
    command = command_of(
        options.launcher,
        placed,
        Meeting(f"ADDRESS_OF_{placed[0].name}", 0),
        folder / "hostfile",
        folder / "config.yaml",
        ssh_port=options.ssh_port,
        launcher_args=options.launcher_args,
    )
    if as_json:
        facts = {
            "hosts": {host.name: list(host.devices) for host in placed},
            "spares": spares,
            "notices": notices,
            "ranks": layout.world_size,
            "command": command,
        }
        print(json.dumps(facts, indent=2))
        return
    first = 0
    for host in placed:
        print(f"{host.name}: ranks {first} to {first + host.slots - 1} on devices {', '.join(map(str, host.devices))}")
        first += host.slots
    for notice in notices:
        print(f"megalite: {notice}")
    print(f"spare: {', '.join(spares) or 'none'}")
    print(" ".join(command))
    print("dry run: nothing was started")
