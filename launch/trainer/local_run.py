"""`megalite train` outside a launcher: checks config, data and checkpoint, then starts the local ranks."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from launch.errors import USER_ERRORS, LaunchError
from launch.runtime.devices import Device, gpu_count
from launch.runtime.local_ranks import rank_environment, start_local_ranks
from launch.runtime.logs import get_logger
from launch.trainer.data import open_data
from launch.trainer.resume import Start, checkpoints_of, exports_of, find_start
from launch.trainer.run_folder import lock_run_folder
from megalite.checkpoint.durable_files import verify_digest
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import find_latest, step_folders
from megalite.config import Config, ResolvedLayout, resolve_layout, wanted_world_size
from megalite.config.known_bad import check_known_bad, installed_versions
from megalite.resilience.signals import START_UP, STOP_SIGNALS, exit_code_for
from models.families import family

log = get_logger(__name__)
CPU_MEASUREMENT_S = 15.0  # longest delay of the first run on a machine


def resolve(config: Config) -> tuple[ResolvedLayout, Device]:
    """Resolves the layout for this machine. Raises ConfigError or LaunchError if it does not fit."""
    gpus = gpu_count()
    device: Device = "cuda" if gpus else "cpu"
    check_run(config)
    world_size = wanted_world_size(config, gpus or None)
    if gpus and world_size > gpus:
        raise LaunchError(
            f"the layout needs {world_size} GPUs and this machine has {gpus}: use a smaller layout, a hostfile "
            "(deepspeed --hostfile), or set DS_ACCELERATOR=cpu to run on the CPU"
        )
    layout = resolve_layout(config, world_size, device)
    check_known_bad(config, layout, installed_versions(), device)
    return layout, device


def check_run(config: Config) -> None:
    """Checks what does not depend on the machine. Raises FamilyError or StorageError."""
    family(config.model.model_type).check(config.model)
    if config.checkpoint.mirror is not None:
        from megalite.checkpoint.remote.storage import check_url  # pulls in fsspec

        check_url(config.checkpoint.mirror)


def end_start_up_on_signals() -> None:
    """Makes SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 end this process cleanly while it has not started the ranks yet."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        log.warning(f"ended by {signal.Signals(number).name} {START_UP}")
        sys.exit(exit_code_for(number))

    for number in STOP_SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, leave)


def start_local_run(config: Config, arguments: Sequence[str]) -> int:
    """Checks config, data and checkpoint, then runs the ranks on this machine; returns their exit code."""
    config, overrides, notices = choose_layout(config)
    layout, device = resolve(config)
    if finish_if_complete(config):
        return 0
    if device == "cpu":  # measured for the run's prediction while nothing else computes here, not beside the ranks
        from launch.planning.this_machine import MeasurementLimits, describe_machine

        with suppress(Exception):  # the run does not need it
            describe_machine(on_cpu=True, limits=MeasurementLimits(timeout_s=CPU_MEASUREMENT_S))
    environment, summary = rank_environment(config.launch, layout.world_size, device == "cuda")
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)}"
    for notice in notices:
        log.info(notice)
    log.info(f"starting {ranks} on {device} ({summary})")
    return start_local_ranks(layout.world_size, environment, [*arguments, *overrides])


def choose_layout(config: Config) -> tuple[Config, list[str], list[str]]:
    """Resolves options that are `auto` for this machine.

    Returns the config, the same choice as overrides, and a notice of what was chosen and why. Raises LaunchError or
    ConfigError if no layout fits.
    """
    if not config.unresolved_options:
        return config, [], []
    from launch.planning.auto_layout import choose_here

    check_run(config)
    chosen = choose_here(config, "cuda" if gpu_count() else "cpu")
    return config.with_resolved(chosen.options), chosen.overrides, [chosen.sentence]


def finish_if_complete(config: Config) -> bool:
    """Returns True if nothing is left to train, after exporting the last checkpoint if its export is missing.

    Raises what the ranks of the run would raise about folder, data and checkpoint.
    """
    lock_run_folder(config).close()  # rank 0 takes it for the run
    start = _find_local_start(config)
    if start.step < config.total_steps:
        return False
    if start.checkpoint is not None and start.manifest is not None:
        try:
            for name, recorded in start.manifest.files.items():
                verify_digest(start.checkpoint / name, recorded)
        except (CheckpointError, OSError):
            return False  # the ranks look for an older checkpoint that is intact
    end = f"of {start.step}" if start.step == config.total_steps else f"and the run ends at step {config.total_steps}"
    log.info(f"{start.checkpoint} is at step {start.step} {end}: nothing left to train")
    if config.checkpoint.export_hf != "off" and start.checkpoint is not None:
        _export_if_missing(config, start.checkpoint)
    return True


def _find_local_start(config: Config) -> Start:
    root = checkpoints_of(config)
    return find_start(config, open_data(config), *(find_latest(root) if step_folders(root) else (None, [])))


def _export_if_missing(config: Config, checkpoint: Path) -> None:
    """Exports the last checkpoint of a run that was killed while it waited for that export."""
    folder = exports_of(config) / checkpoint.name
    if folder.exists():
        return
    from launch.huggingface.exporting import export_hugging_face

    log.info(f"exporting it to {folder}")
    with lock_run_folder(config):
        try:
            export_hugging_face(checkpoint, folder, dtype=config.checkpoint.export_hf_dtype)
        except USER_ERRORS as error:  # no failure of the run, whose training is complete
            log.error(f"{folder} is NOT made: {error}; by hand: megalite export {checkpoint} {folder}")


def print_dry_run(config: Config, *, as_json: bool) -> None:
    """Prints the resolved config, the layout and the parameters per rank, without starting anything."""
    config, _, chosen = choose_layout(config)
    layout, device = resolve(config)
    from launch.trainer.layout_table import layout_rows, layout_table

    source = config.training.initialize_from
    start = _find_local_start(config) if source is not None and source.exists() else Start()  # hub ids: no download

    rows = layout_rows(config, layout)
    if as_json:
        facts = {"device": device, "config": config.model_dump(mode="json"), "layout": asdict(layout)}
        print(json.dumps(facts | {"ranks": [asdict(row) for row in rows]}, indent=2))
        return
    print(config.to_yaml())
    layout_table(rows, layout).print()
    for notice in (*chosen, *layout.notices, *start.notices):
        log.info(notice)
    print(f"dry run on {device}: nothing was started")
