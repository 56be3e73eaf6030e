"""Output of `megalite launch`: the doctor's report on the hosts, and what a dry run would start."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cluster.deepspeed_launcher import check_launcher, launcher_command
from launch.cluster.doctor.findings import Severity
from launch.cluster.doctor.preflight import PreflightReport
from launch.cluster.host_selection import expected_device, per_node, unused_slots, wanted_ranks
from launch.cluster.placement import place_hosts
from launch.cluster.supervisor import FOLDER, Options
from launch.errors import LaunchError
from launch.output import print_json
from launch.planning.auto_layout import layout_or_likely
from launch.runtime.forwarded_environment import PLAIN
from launch.runtime.hostfile import Host
from launch.runtime.logs import get_logger
from launch.runtime.modules import RANK_SCRIPT
from megalite.config import Config, ResolvedLayout
from megalite.planner.search import Ranks

log = get_logger(__name__)


def log_report(report: PreflightReport) -> None:
    """Logs the conclusion of a preflight and every finding that is not OK."""
    log.log(logging.INFO if report.passed else logging.WARNING, "%s", report.conclusion())
    for finding in report.findings:
        if finding.verdict != Severity.OK:
            check = f"{finding.check} failed" if finding.verdict == Severity.FAIL else finding.check
            log.warning("%s: %s", check, finding)


def likely_layout(config: Config, hosts: Sequence[Host], spares: int) -> tuple[Config, ResolvedLayout, list[str]]:
    """Predicts config, layout and notices before any host is asked.

    Raises LaunchError or ConfigError if there is no layout for these hosts.
    """
    device = expected_device()
    count = wanted_ranks(config, hosts, spares, device)
    likely, layout, later = layout_or_likely(config, Ranks(count, per_node(hosts), device))
    return likely, layout, [*later, *unused_slots(config, hosts, spares, count, device)]


def check_launchable(config: Config, hosts: Sequence[Host], options: Options) -> None:
    """Raises LaunchError if the launcher does not support these hosts, or if shells would change one of our paths."""
    check_launcher(options.launcher, hosts, options.ssh_port)
    paths = {
        "run_dir": config.run_dir.absolute(),
        "this folder": Path.cwd(),
        "Python": Path(sys.executable),
        "megalite": RANK_SCRIPT,
    }
    for what, path in paths.items():
        if not PLAIN.fullmatch(str(path)):
            raise LaunchError(
                f"{what}, {path}, has characters that shells on the hosts would change: choose a path of letters, "
                "digits and _ - . / alone"
            )


def describe(config: Config, hosts: Sequence[Host], options: Options, *, as_json: bool) -> None:
    """Prints the dry run: hosts in rank order and the launcher's command. Connects to no host."""
    main = hosts[: len(hosts) - options.spares]
    likely, layout, later = likely_layout(config, hosts, options.spares)
    placed, notices = place_hosts(likely, layout, main, options.topology)
    notices = (*later, *notices)
    check_launcher(options.launcher, placed, options.ssh_port)
    used = {host.name for host in placed}
    spares = [host.name for host in hosts if host.name not in used]
    folder = (config.run_dir / FOLDER / "ATTEMPT").absolute()
    command = launcher_command(
        options.launcher,
        placed,
        (f"ADDRESS_OF_{placed[0].name}", 0),
        folder,
        ssh_port=options.ssh_port,
        launcher_args=options.launcher_args,
    )
    if as_json:
        devices = {host.name: list(host.devices) for host in placed}
        facts = {"hosts": devices, "spares": spares, "notices": notices, "ranks": layout.world_size}
        print_json({**facts, "command": command})
        return
    first = 0
    for host in placed:
        print(f"{host.name}: ranks {first} to {first + host.slots - 1} on devices {', '.join(map(str, host.devices))}")
        first += host.slots
    for notice in notices:
        log.info(notice)
    print(f"spare: {', '.join(spares) or 'none'}")
    print(shlex.join(command))
    print("dry run: nothing was started")
