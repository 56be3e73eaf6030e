"""Command-line options of `megalite launch`: a supervised run on the hosts of a hostfile."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.backends.submission import load_checked_config
from launch.cli.options import (
    ConfigPath,
    Exclude,
    FirstWait,
    Grace,
    Hostfile,
    Include,
    LongestWait,
    Overrides,
    Restarts,
    Silence,
    SshPort,
    TopologyPath,
)
from launch.cluster.deepspeed_launcher import Launcher
from launch.errors import LaunchError


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
) -> None:
    """Train on the hosts of a hostfile, or resume training there.

    Checks all hosts first (`megalite doctor`), starts the ranks through `deepspeed`, and monitors hosts and ranks. When
    the run fails, it is ended on all hosts and restarted from its newest checkpoint: with a spare host in place of a
    lost one, or on fewer hosts if parallel.data_parallel_size is auto. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are
    forwarded to the ranks, which save and end (exit code 75); Ctrl-C ends everything at once.

    Example: `megalite launch --hostfile hosts --restarts 20 --spares 1 configs/quickstart.yaml`
    """
    from launch.runtime.hostfile import read_hostfile, select_hosts

    config = load_checked_config(config_path, overrides)
    hosts = select_hosts(read_hostfile(hostfile), include, exclude)
    from launch.cluster.description import check_launchable, describe, likely_layout, log_report
    from launch.cluster.supervisor import HostsSupervisor, Options
    from launch.cluster.switch_topology import read_topology
    from launch.supervision.supervisor import Policy
    from launch.trainer.data import open_data
    from launch.trainer.local_run import finish_if_complete

    options = Options(
        launcher=launcher,
        launcher_args=launcher_args,
        spares=spares,
        ssh_port=ssh_port,
        host_timeout_s=host_timeout,
        wait_for_hosts_s=60 * wait_for_hosts,
        topology=read_topology(topology) if topology is not None else None,
    )
    check_launchable(config, hosts, options)
    if dry_run:
        open_data(config)
        describe(config, hosts, options, as_json=as_json)
        return
    if as_json:
        raise LaunchError("--json belongs to --dry-run: a run's results are in metrics.jsonl and receipt.json")
    likely_layout(config, hosts, spares)
    if finish_if_complete(config):
        return
    with HostsSupervisor(
        config, hosts, Policy(restarts, first_wait, longest_wait, grace, silence), options, log_report
    ) as supervisor:
        raise typer.Exit(supervisor.run())
