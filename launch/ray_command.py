"""`megalite ray`: a run as a Ray Train job, started again when it fails. Ray is an extra; it is not imported here."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

import typer

from launch.arguments import ConfigPath, Overrides
from launch.errors import LaunchError
from launch.run_config import load_run_config
from megalite.config import Config


def ray(
    config_path: ConfigPath,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Ranks; default: as many as the layout needs.")] = None,
    gpus_per_worker: Annotated[
        int | None, typer.Option(min=0, max=1, help="Default: 1 where this machine has GPUs.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="A Ray cluster that runs, such as auto; default: RAY_ADDRESS, or one of this machine."),
    ] = None,
    max_failures: Annotated[int, typer.Option(min=0, metavar="N", help="Restarts at most.")] = 3,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that ranks have to save after SIGTERM or SIGHUP.")
    ] = 120.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be started; start nothing.")] = False,
) -> None:
    """Train on Ray's workers, one rank each, or go on training there. Needs `pip install megalite[ray]`.

    A rank, worker or host that fails ends the attempt, and the next one resumes from the newest checkpoint; not after a
    mistake, nor twice at the same step: as `megalite supervise`. The run's folder, the data and this code must be at
    the same path on all hosts. What ranks say is in the run's folder, in `ray/`.

    Example: `megalite ray configs/quickstart.yaml --workers 8 --max-failures 3`
    """
    from launch.backends.ray import RaySupervisor, check_address
    from launch.devices import gpu_count
    from launch.plan.automatic import layout_or_likely, sizes_in_words
    from launch.start import check_run, is_done
    from launch.supervise import Policy, check_resumes
    from megalite.planner.search import Ranks

    config = load_run_config(config_path, overrides or [])
    gpus = (1 if gpu_count() else 0) if gpus_per_worker is None else gpus_per_worker
    where = address or os.environ.get("RAY_ADDRESS", "")
    check_run(config)
    check_resumes(config)
    count = _workers(config, workers, gpus, where)
    _, layout, notices = layout_or_likely(config, Ranks(count, count, "cuda" if gpus else "cpu"))
    if importlib.util.find_spec("ray") is None:
        raise LaunchError("Ray is not installed: pip install 'megalite[ray]', or train without it (megalite train)")
    sizes = sizes_in_words(config, layout)
    cluster = f"the Ray cluster at {where}" if where else "a Ray cluster of this machine"
    print(f"megalite: {count} workers ({sizes}), {gpus} GPUs each, on {cluster}", flush=True)
    for notice in notices:
        print(f"megalite: {notice}", flush=True)
    if dry_run:
        print("dry run: nothing was started")
        return
    check_address(where)
    if is_done(config):
        return
    command = [sys.executable, "-m", "launch.backends.ray", str(count), str(gpus), where, str(grace), str(config_path)]
    policy = Policy(restarts=max_failures, grace_s=grace)
    supervisor = RaySupervisor(config, [*command, *(overrides or [])], policy, is_local=not where)
    raise typer.Exit(supervisor.run())


def _workers(config: Config, wanted: int | None, gpus: int, where: str) -> int:
    if wanted is not None:
        return wanted
    if config.parallel.data_parallel_size == "auto" and where:
        raise LaunchError(
            f"how many workers the cluster at {where} is to run is not said: give --workers, or set "
            "parallel.data_parallel_size"
        )
    from launch.devices import gpu_count

    return config.world_size_wanted(gpu_count() if gpus else None)
