"""`megalite launch`: a run on the hosts of a hostfile, checked before, watched during, started again after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.arguments import ConfigPath, Exclude, Hostfile, Include, Overrides, SshPort
from launch.backends.deepspeed import Launcher
from launch.errors import LaunchError
from launch.run_config import load_run_config


def launch(
    config_path: ConfigPath,
    hostfile: Hostfile,
    overrides: Overrides = None,
    include: Include = None,
    exclude: Exclude = None,
    launcher: Annotated[Launcher, typer.Option(help="What deepspeed starts the ranks with.")] = Launcher.PDSH,
    launcher_args: Annotated[str, typer.Option(help="Handed to it.")] = "",
    restarts: Annotated[int, typer.Option(min=0, help="Restarts at most.")] = 5,
    spares: Annotated[int, typer.Option(min=0, metavar="K", help="Keep the last K hosts in reserve.")] = 0,
    topology: Annotated[
        Path | None,
        typer.Option(help="Which switch each host is at, in topology.conf's words; hosts are placed by it."),
    ] = None,
    ssh_port: SshPort = None,
    wait_for_hosts: Annotated[
        float,
        typer.Option(min=0, metavar="MINUTES", help="That a restart waits for hosts it lacks, as while they boot."),
    ] = 10.0,
    host_timeout: Annotated[
        float, typer.Option(min=5, help="Seconds without a sign of a host until its ranks are given up.")
    ] = 20.0,
    silence: Annotated[
        float,
        typer.Option(min=0, help="Seconds without a sign of life of a rank until the run is started again; 0: never."),
    ] = 60.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that ranks have to save after SIGTERM or SIGHUP.")
    ] = 120.0,
    first_wait: Annotated[float, typer.Option(min=0, help="Seconds before the first restart; doubles.")] = 1.0,
    longest_wait: Annotated[float, typer.Option(min=0, help="Seconds before a restart at most.")] = 300.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be started where; connect to no host.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
) -> None:
    """Train on the hosts of a hostfile, or go on training there.

    Looks at all hosts first (`megalite doctor`), starts the ranks through `deepspeed`, watches hosts and ranks, and
    when the run fails ends all of it everywhere and starts it again from its newest checkpoint: on a spare host instead
    of a lost one, or, where parallel.data_parallel_size is auto, on fewer. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go to
    the ranks, which save and end (exit code 75); Ctrl-C ends all at once.

    Example: `megalite launch --hostfile hosts --restarts 20 --spares 1 configs/quickstart.yaml`
    """
    from launch.hostfile import read_hostfile, select_hosts

    config = load_run_config(config_path, overrides or [])
    hosts = select_hosts(read_hostfile(hostfile), include, exclude)
    from launch.data import open_data
    from launch.hosts.description import check_words, describe, expected_layout, show
    from launch.hosts.supervisor import HostsSupervisor, Options
    from launch.start import check_run, is_done
    from launch.supervise import Policy, check_resumes
    from launch.topology import read_topology

    check_resumes(config)
    check_run(config)
    options = Options(
        launcher=launcher,
        launcher_args=launcher_args,
        spares=spares,
        ssh_port=ssh_port,
        host_timeout_s=host_timeout,
        wait_for_hosts_s=60 * wait_for_hosts,
        topology=read_topology(topology) if topology is not None else None,
    )
    check_words(config, hosts, options)
    if dry_run:
        open_data(config)
        describe(config, hosts, options, as_json=as_json)
        return
    if as_json:
        raise LaunchError("--json belongs to --dry-run: a run's results are in metrics.jsonl and receipt.json")
    expected_layout(config, hosts, spares)
    if is_done(config):
        return
    with HostsSupervisor(
        config, hosts, Policy(restarts, first_wait, longest_wait, grace, silence), options, show
    ) as supervisor:
        raise typer.Exit(supervisor.run())
