"""The command `megalite ray`: a supervised run as a Ray Train job; launch/backends implements it.

Ray itself, an extra, is not imported.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Annotated

import typer

from launch.backends.job_generation import load_checked_config
from launch.cli.options import AllowChange, ConfigPath, Force, Overrides, SharedRunDir
from launch.errors import LaunchError
from launch.runtime.devices import gpu_count
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.runtime.started_modules import RAY_DRIVER, python_command
from launch.trainer.start.flags import StartFlags
from megalite.config import Config, wanted_world_size
from megalite.units import plural

log = get_logger(__name__)


def ray(
    config_path: ConfigPath,
    overrides: Overrides = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; default: as many as the layout needs.")
    ] = None,
    gpus_per_worker: Annotated[
        int | None, typer.Option(min=0, max=1, help="GPUs per worker; default: 1 if this machine has GPUs.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a running Ray cluster, or auto; default: RAY_ADDRESS, or a new local one."),
    ] = None,
    insecure_cluster: Annotated[
        bool,
        typer.Option("--insecure-cluster", help="Admit an --address without tokens; others can run programs as you."),
    ] = False,
    max_failures: Annotated[int, typer.Option(min=0, metavar="N", help="Maximum number of restarts.")] = 3,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that ranks have to save after SIGTERM or SIGHUP.")
    ] = 120.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started; start nothing.")] = False,
    force: Force = False,
    allow_change: AllowChange = False,
    shared_run_dir: SharedRunDir = False,
) -> None:
    """Train on Ray workers, one rank each, or resume training there. Needs `pip install megalite[ray]`.

    When a rank, worker or host fails, the attempt ends and the next one resumes from the newest checkpoint, unless the
    failure is a mistake or repeats at the same step, as with `megalite supervise`. The run's folder, the data and this
    code must be at the same path on all hosts. Logs of the ranks are in the run's folder, in `ray/`.

    Example: `megalite ray configs/quickstart.yaml --workers 8 --max-failures 3`
    """
    from launch.backends.ray import RaySupervisor
    from launch.backends.ray_cluster import check_address
    from launch.prediction.auto_layout import format_sizes, layout_or_likely
    from launch.supervision.supervisor import Policy
    from launch.trainer.data.remote_data import check_remote_data
    from launch.trainer.local_run import finish_if_complete
    from launch.trainer.start.checks import find_position
    from megalite.planner.search import Ranks

    config = load_checked_config(config_path, overrides)
    gpus = (1 if gpu_count() else 0) if gpus_per_worker is None else gpus_per_worker
    if insecure_cluster and not (address or os.environ.get("RAY_ADDRESS")):
        raise LaunchError("--insecure-cluster belongs to --address: a cluster that this command starts has a token")
    where = address or os.environ.get("RAY_ADDRESS", "")
    count = _workers(config, workers, gpus, where)
    _, layout, notices = layout_or_likely(config, Ranks(count, count, "cuda" if gpus else "cpu"))
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("Ray is not installed: pip install 'megalite[ray]', or train without it (megalite train)")
    sizes = format_sizes(config, layout)
    cluster = f"the Ray cluster at {where}" if where else "a Ray cluster of this machine"
    log.info(f"{plural(count, 'worker')} ({sizes}), {plural(gpus, 'GPU')} each, on {cluster}")
    for notice in notices:
        log.info(notice)
    flags = StartFlags(force, allow_change, shared_run_dir)
    awaited = check_remote_data(config.data, config.training.sequence_length, log.info)
    if awaited is not None:
        log.info(awaited)
    position = None if awaited is not None else find_position(config, flags, is_dry=dry_run)
    if dry_run:
        say("dry run: nothing was started")
        return
    check_address(where)
    if position is not None and finish_if_complete(position):
        return
    settings = [str(count), str(gpus), where, "insecure" if insecure_cluster else "", str(grace)]
    command = python_command(RAY_DRIVER, *settings, str(config_path))
    policy = Policy(restarts=max_failures, grace_s=grace)
    supervisor = RaySupervisor(config, [*command, *(overrides or []), *flags.words], policy, is_local=not where)
    raise typer.Exit(supervisor.run())


def _workers(config: Config, wanted: int | None, gpus: int, where: str) -> int:
    if wanted is not None:
        return wanted
    if config.parallel.data_parallel_size == "auto" and where:
        raise LaunchError(
            f"how many workers the cluster at {where} is to run is not said: give --workers, or set "
            "parallel.data_parallel_size"
        )
    return wanted_world_size(config, gpu_count() if gpus else None)
