"""`megalite doctor`: the words of the command line, and where its report goes. No torch."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.arguments import Exclude, Hostfile, Include, Overrides, SshPort
from launch.errors import FAILED_CODE, INTERRUPTED_CODE, LaunchError
from launch.run_config import load_run_config

if TYPE_CHECKING:
    from launch.doctor.bandwidth import Links
    from launch.doctor.findings import Settings
    from launch.doctor.preflight import Report
    from launch.hosts.connection import HostConnection


def doctor(
    hostfile: Hostfile,
    config_path: Annotated[
        Path | None,
        typer.Argument(help="The run's: folder, data, layout are checked.", metavar="[CONFIG.yaml]"),
    ] = None,
    overrides: Overrides = None,
    include: Include = None,
    exclude: Exclude = None,
    ssh_port: SshPort = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Without CONFIG.yaml: the folder that all hosts must share.")
    ] = None,
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Also measure the links between hosts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Ask all hosts at once what would keep them from training together; start no run.

    Looked at: ssh, Python, packages, code, devices, addresses, TCP between all hosts, whether they share the run's
    folder, data, free room, clocks, locks left by compilers, limits. Exit code 0 if nothing fails, though there may be
    warnings; 1 if something does.

    Example: `megalite doctor --hostfile hosts configs/quickstart.yaml`
    """
    from launch.doctor.bandwidth import measure
    from launch.doctor.preflight import preflight
    from launch.hostfile import read_hostfile, select_hosts
    from launch.hosts.connection import connect_all

    hosts = select_hosts(read_hostfile(hostfile), include, exclude)
    settings = _settings(config_path, overrides or [], run_dir)
    began = time.monotonic()
    try:
        connections, errors = connect_all([host.name for host in hosts], ssh_port=ssh_port)
        with _closed_at_end(connections):
            report = preflight(connections, errors, hosts, settings)
            report = replace(report, seconds=time.monotonic() - began)
            links = measure(connections, report) if bandwidth else None
    except KeyboardInterrupt:
        print("megalite: interrupted; no verdict", file=sys.stderr)
        raise typer.Exit(INTERRUPTED_CODE) from None
    _tell(report, links, as_json)
    if not report.passed or (links is not None and links.problem):
        raise typer.Exit(FAILED_CODE)


@contextmanager
def _closed_at_end(connections: Mapping[str, HostConnection]) -> Iterator[None]:
    """Or at Ctrl-C, at once: whoever still waits for an answer then has none."""
    from launch.hosts.connection import in_parallel

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


def _settings(config_path: Path | None, overrides: list[str], run_dir: Path | None) -> Settings:
    from launch.doctor.findings import Settings

    if config_path is None:
        return Settings(run_dir=run_dir.absolute() if run_dir is not None else None)
    if run_dir is not None:
        raise LaunchError(
            f"--run-dir {run_dir} is for a doctor without a config, and {config_path} has a run_dir: drop one of them"
        )
    config = load_run_config(config_path, overrides)
    return replace(Settings.of(config), layout_of=config)


def _tell(report: Report, links: Links | None, as_json: bool) -> None:
    if as_json:
        measured = None if links is None else asdict(links)
        print(json.dumps({**report.as_json(), "bandwidth": measured}, indent=2))
        return
    from rich.console import Console

    from launch.doctor import report as reports

    show = Console(width=None if sys.stdout.isatty() else reports.WIDTH, highlight=False).print
    show(reports.table(report))
    if links is not None:
        if links.links:
            show(reports.links_table(links))
        print(reports.links_conclusion(links))
    print(reports.conclusion(report))
