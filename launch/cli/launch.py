"""The command `megalite launch`: a monitored run on the hosts of a hostfile; launch/cluster implements it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from launch.backends.job_generation import load_checked_config
from launch.cli.options import (
    AllowChange,
    ConfigPath,
    Exclude,
    FirstWait,
    Force,
    Grace,
    Hostfile,
    Include,
    LongestWait,
    Overrides,
    Restarts,
    SharedRunDir,
    Silence,
    SshPort,
    TopologyPath,
)
from launch.cluster.deepspeed_launcher import FOLDER, Launcher, check_launcher, check_paths, launcher_command
from launch.cluster.host_selection import likely_layout
from launch.cluster.hosts_supervisor import HostsSupervisor, Options
from launch.cluster.placement import place_hosts
from launch.cluster.switch_topology import read_topology
from launch.errors import LaunchError
from launch.output import print_json
from launch.runtime.hostfile import Host, read_hostfile, select_hosts
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.supervision.supervisor import Policy
from launch.trainer.data.remote_data import check_remote_data
from launch.trainer.local_run import finish_if_complete
from launch.trainer.run_summary import print_lines, run_facts, summary_lines
from launch.trainer.start.checks import RunPosition, find_position
from launch.trainer.start.flags import StartFlags
from megalite.units import plural

log = get_logger(__name__)


def launch(
    config_path: ConfigPath,
    hostfile: Hostfile,
    overrides: Overrides = None,
    include: Include = None,
    exclude: Exclude = None,
    launcher: Annotated[Launcher, typer.Option(help="Back end with which deepspeed starts the ranks.")] = "pdsh",
    launcher_args: Annotated[str, typer.Option(help="Extra arguments of the launcher.")] = "",
    restarts: Restarts = 5,
    spares: Annotated[int, typer.Option(min=0, metavar="K", help="Keep the last K hosts in reserve.")] = 0,
    topology: TopologyPath = None,
    interface: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Network interface on which the ranks communicate, as launch.interface."),
    ] = None,
    ssh_port: SshPort = None,
    wait_for_hosts: Annotated[
        float,
        typer.Option(
            min=0, metavar="MINUTES", help="How long a restart waits for missing hosts, for example while they boot."
        ),
    ] = 10.0,
    host_timeout: Annotated[
        float, typer.Option(min=5, help="Seconds without an answer until a host counts as lost.")
    ] = 20.0,
    silence: Silence = 60.0,
    grace: Grace = 120.0,
    first_wait: FirstWait = 1.0,
    longest_wait: LongestWait = 300.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started where; connect to no host.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as JSON.")] = False,
    force: Force = False,
    allow_change: AllowChange = False,
    shared_run_dir: SharedRunDir = False,
) -> None:
    """Train on the hosts of a hostfile, or resume training there.

    Checks all hosts first (`megalite doctor`), starts the ranks through `deepspeed`, and monitors hosts and ranks. When
    the run fails, it is ended on all hosts and restarted from its newest checkpoint: with a spare host in place of a
    lost one, or on fewer hosts if parallel.data_parallel_size is auto. SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 (exit code 75)
    and Ctrl-C (130) are forwarded to the ranks, which save and end; a second one ends everything at once.

    Example: `megalite launch --hostfile hosts --restarts 20 --spares 1 configs/quickstart.yaml`
    """
    if interface is not None:
        overrides = [*(overrides or []), f"launch.interface={interface}"]
    config = load_checked_config(config_path, overrides)
    hosts = select_hosts(read_hostfile(hostfile), include, exclude)
    options = Options(
        launcher=launcher,
        launcher_args=launcher_args,
        spares=spares,
        ssh_port=ssh_port,
        host_timeout_s=host_timeout,
        wait_for_hosts_s=60 * wait_for_hosts,
        topology=read_topology(topology) if topology is not None else None,
        flags=StartFlags(force, allow_change, shared_run_dir),
    )
    check_launcher(launcher, hosts, ssh_port)
    check_paths(config.run_dir.absolute())
    if dry_run:
        _print_dry_run(find_position(config, options.flags, is_dry=True), hosts, options, as_json=as_json)
        return
    if as_json:
        raise LaunchError("--json belongs to --dry-run: a run's results are in metrics.jsonl and receipt.json")
    likely_layout(config, hosts, spares)
    if notice := check_remote_data(config.data, config.training.sequence_length, log.info):
        log.info(notice)
    elif finish_if_complete(find_position(config, options.flags)):
        return
    policy = Policy(restarts, first_wait, longest_wait, grace, silence)
    with HostsSupervisor(config, hosts, policy, options) as supervisor:
        raise typer.Exit(supervisor.run())


def _print_dry_run(position: RunPosition, hosts: Sequence[Host], options: Options, *, as_json: bool) -> None:
    """Prints the dry run: a summary of the run, hosts in rank order, the launcher's command. Connects to no host."""
    config = position.config
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
        flags=options.flags,
    )
    ranks = f"{plural(layout.world_size, 'rank')} on {plural(len(placed), 'host')}"
    summary = run_facts(likely, layout, position.data, position.start, ranks)
    if as_json:
        devices = {host.name: list(host.devices) for host in placed}
        facts = {"hosts": devices, "spares": spares, "notices": notices, "ranks": layout.world_size}
        print_json({**facts, "command": command, "summary": summary})
        return
    print_lines(summary_lines(summary))
    first = 0
    for host in placed:
        say(f"{host.name}: ranks {first} to {first + host.slots - 1} on devices {', '.join(map(str, host.devices))}")
        first += host.slots
    for notice in notices:
        log.info(notice)
    say(f"spare: {', '.join(spares) or 'none'}")
    say(shlex.join(command))
    say("dry run: nothing was started")
