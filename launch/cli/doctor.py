"""The command `megalite doctor`, and the output of its report; launch/cluster/doctor implements it. No torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import AsJson, Exclude, Include, Overrides, SshPort
from launch.cluster.doctor.findings import Settings
from launch.cluster.doctor.link_bandwidth import measure
from launch.cluster.doctor.preflight import preflight
from launch.cluster.doctor.this_machine import examine_this_machine
from launch.cluster.ssh.connection import HostConnection, connect_all, in_parallel
from launch.errors import FAILED_CODE, INTERRUPTED_CODE, LaunchError
from launch.output import print_json
from launch.runtime.hostfile import read_hostfile, select_hosts
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.trainer.start.run_config import load_run_config

log = get_logger(__name__)


def doctor(
    config_path: Annotated[
        Path | None,
        typer.Argument(help="Config of the run whose folder, data and layout are checked.", metavar="[CONFIG.yaml]"),
    ] = None,
    overrides: Overrides = None,
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="File with lines such as `node1 slots=8`; default: this machine alone."),
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    ssh_port: SshPort = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder that all hosts must share, if there is no CONFIG.yaml.")
    ] = None,
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Also measure the links between hosts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, or all hosts of a hostfile, for problems that would prevent a run; start nothing.

    Checks ssh, Python, packages, code, devices, addresses, TCP between all hosts, whether the run's folder is shared,
    data, free space, clocks, stale compile locks, limits, and what lets other users into a run; on all hosts in
    parallel. Exit code 0 if nothing fails, though there may be warnings; 1 otherwise.

    Example: `megalite doctor --hostfile hosts configs/quickstart.yaml`, and for this machine `megalite doctor`
    """
    hosts = select_hosts(read_hostfile(hostfile), include, exclude) if hostfile is not None else ()
    of_hosts = {"--include": include, "--exclude": exclude, "--ssh-port": ssh_port, "--bandwidth": bandwidth or None}
    for option, value in of_hosts.items() if hostfile is None else ():
        if value is not None:
            raise LaunchError(f"{option} is about the hosts of a hostfile: name it with --hostfile")
    if config_path is None:
        settings = Settings(run_dir=run_dir.absolute() if run_dir is not None else None)
    elif run_dir is not None:
        raise LaunchError(
            f"--run-dir {run_dir} is for a doctor without a config, and {config_path} has a run_dir: drop one of them"
        )
    else:
        config = load_run_config(config_path, overrides or [])
        settings = replace(Settings.of(config), layout_of=config)
    began, links = time.monotonic(), None
    try:
        if hostfile is None:
            report = examine_this_machine(settings)
        else:
            connections, errors = connect_all([host.name for host in hosts], ssh_port=ssh_port)
            with _closing(connections):
                report = preflight(connections, errors, hosts, settings)
                report = replace(report, seconds=time.monotonic() - began)
                links = measure(connections, report) if bandwidth else None
    except KeyboardInterrupt:
        log.error("interrupted before the checks were complete")
        raise typer.Exit(INTERRUPTED_CODE) from None
    if as_json:
        print_json({**report.as_json(), "bandwidth": None if links is None else asdict(links)})
    else:
        report.table().print()
        if links is not None:
            if links.links:
                links.table().print()
            say(links.conclusion())
        say(report.conclusion())
    if not report.passed or (links is not None and links.problem):
        raise typer.Exit(FAILED_CODE)


@contextmanager
def _closing(connections: Mapping[str, HostConnection]) -> Iterator[None]:
    """Closes the connections at the end, or immediately on Ctrl-C, which wakes threads that wait for an answer."""

    def close() -> None:
        in_parallel(list(connections), lambda name: connections[name].close())

    def interrupt(*_: object) -> None:
        close()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        close()
