"""What `megalite launch` shows: the hosts as the doctor sees them, and what a dry run would start."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.backends.deepspeed import PLAIN, SCRIPT, Meeting, check_launcher, command_of
from launch.doctor.findings import Verdict
from launch.doctor.preflight import Report
from launch.doctor.report import conclusion
from launch.errors import LaunchError
from launch.hostfile import Host
from launch.hosts.choice import expected_device, per_node, unused_slots, wanted_ranks
from launch.hosts.supervisor import FOLDER, Options
from launch.placement import place_hosts
from launch.plan.automatic import layout_or_likely
from megalite.config import Config, ResolvedLayout
from megalite.planner.search import Ranks


def show(report: Report) -> None:
    """On stderr: one line, and one for each thing that is not as it should be."""
    print(f"megalite: {conclusion(report)}", file=sys.stderr, flush=True)
    for finding in report.findings:
        if finding.verdict != Verdict.OK:
            print(f"megalite: {finding.verdict.lower()}: {finding.check}: {finding}", file=sys.stderr, flush=True)


def expected_layout(config: Config, hosts: Sequence[Host], spares: int) -> ResolvedLayout:
    """What can be told of the layout before a host is asked. Raises LaunchError or ConfigError where it cannot be."""
    return _likely(config, hosts, spares)[1]


def _likely(config: Config, hosts: Sequence[Host], spares: int) -> tuple[Config, ResolvedLayout, list[str]]:
    device = expected_device()
    count = wanted_ranks(config, hosts, spares, device)
    likely, layout, later = layout_or_likely(config, Ranks(count, per_node(hosts), device))
    return likely, layout, [*later, *unused_slots(config, hosts, spares, count, device)]


def check_words(config: Config, hosts: Sequence[Host], options: Options) -> None:
    """Raises LaunchError where the launcher cannot do it, or where a path is none that shells on hosts leave alone."""
    check_launcher(options.launcher, hosts, options.ssh_port)
    paths = {
        "run_dir": config.run_dir.absolute(),
        "this folder": Path.cwd(),
        "Python": Path(sys.executable),
        "megalite": SCRIPT,
    }
    for what, path in paths.items():
        if not PLAIN.fullmatch(str(path)):
            raise LaunchError(
                f"{what}, {path}, has characters that shells on the hosts would change: choose a path of letters, "
                "digits and _ - . / alone"
            )


def describe(config: Config, hosts: Sequence[Host], options: Options, *, as_json: bool) -> None:
    """The dry run: which hosts, in rank order, and the command; no host is asked anything."""
    main = hosts[: len(hosts) - options.spares]
    likely, layout, later = _likely(config, hosts, options.spares)
    placed, notices = place_hosts(likely, layout, main, options.topology)
    notices = (*later, *notices)
    check_launcher(options.launcher, placed, options.ssh_port)
    used = {host.name for host in placed}
    spares = [host.name for host in hosts if host.name not in used]
    folder = (config.run_dir / FOLDER / "ATTEMPT").absolute()
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
    print(shlex.join(command))
    print("dry run: nothing was started")
