"""`megalite train` outside a launcher: everything is checked here, before any rank is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from launch.data import open_data
from launch.devices import Device, gpu_count
from launch.errors import USER_ERRORS, LaunchError
from launch.exporter import exports_of
from launch.local import rank_environment, start_local_ranks
from launch.resume import Start, checkpoints_of, find_start
from launch.run_folder import lock_run_folder
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.files import verify_digest
from megalite.checkpoint.manifest import find_latest, step_folders
from megalite.config import Config, ResolvedLayout
from megalite.config.known_bad import check_known_bad, installed_versions
from models.families import family

QUIET_S = 15.0  # before the ranks of a run start, once on a machine


def resolve(config: Config) -> tuple[ResolvedLayout, Device]:
    """The layout on this machine. Raises ConfigError or LaunchError where it cannot be."""
    gpus = gpu_count()
    device: Device = "cuda" if gpus else "cpu"
    check_run(config)
    world_size = config.world_size_wanted(gpus or None)
    if gpus and world_size > gpus:
        raise LaunchError(
            f"the layout needs {world_size} GPUs and this machine has {gpus}: use a smaller layout, a hostfile "
            "(deepspeed --hostfile), or set DS_ACCELERATOR=cpu to run on the CPU"
        )
    layout = config.check_world(world_size, device)
    check_known_bad(config, layout, installed_versions(), device)
    return layout, device


def check_run(config: Config) -> None:
    """What can be said wherever it runs. Raises FamilyError or StorageError."""
    family(config.model.model_type).check(config.model)
    if config.checkpoint.mirror is not None:
        from megalite.checkpoint.storage import check_url  # pulls in fsspec

        check_url(config.checkpoint.mirror)


def start(config: Config, arguments: Sequence[str]) -> int:
    """Checks config, data and checkpoint, then runs the local ranks; returns their exit code."""
    config, words, chosen = settle(config)
    layout, device = resolve(config)
    if is_done(config):
        return 0
    if device == "cpu":
        _measure_cpu()
    environment, said = rank_environment(config.launch, layout.world_size, device == "cuda")
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)}"
    for sentence in chosen:
        print(f"megalite: {sentence}", flush=True)
    print(f"megalite: starting {ranks} on {device} ({said})", flush=True)
    return start_local_ranks(layout.world_size, environment, [*arguments, *words])


def _measure_cpu() -> None:
    """For the run's prediction, while nothing else computes here: ranks would measure it beside their work."""
    from launch.plan.this_machine import Care, describe_machine

    with suppress(Exception):  # the run does not need it
        describe_machine(on_cpu=True, care=Care(at_most_s=QUIET_S))


def settle(config: Config) -> tuple[Config, list[str], list[str]]:
    """A config that says `auto` with a layout for this machine, as overrides too, and what was chosen and why.

    Raises LaunchError or ConfigError where nothing fits.
    """
    if not config.open:
        return config, [], []
    from launch.plan.automatic import choose_here

    check_run(config)
    chosen = choose_here(config, "cuda" if gpu_count() else "cpu")
    return config.settled(chosen.options), chosen.overrides, [chosen.sentence]


def is_done(config: Config) -> bool:
    """Looks at folder, data and checkpoint; where nothing is left to train, says so and exports what is missing."""
    lock_run_folder(config).close()  # rank 0 takes it for the run
    begin = _beginning(config)
    if begin.step < config.total_steps or not _is_intact(begin):
        return False
    print(f"megalite: {begin.checkpoint} is at step {begin.step} of {config.total_steps}: nothing left to train")
    _export_what_is_missing(config, begin)
    return True


def _beginning(config: Config) -> Start:
    root = checkpoints_of(config)
    return find_start(config, open_data(config), *(find_latest(root) if step_folders(root) else (None, [])))


def _export_what_is_missing(config: Config, begin: Start) -> None:
    """Of a run that was killed while the end of its training waited for the Hugging Face folder of its last step."""
    if config.checkpoint.export_hf == "off" or begin.checkpoint is None:
        return
    folder = exports_of(config) / begin.checkpoint.name
    if folder.exists():
        return
    from launch.convert import export_hugging_face

    print(f"megalite: exporting it to {folder}", flush=True)
    with lock_run_folder(config):
        try:
            export_hugging_face(begin.checkpoint, folder, dtype=config.checkpoint.export_hf_dtype)
        except USER_ERRORS as error:  # as beside a run: what was to be trained is trained
            by_hand = f"megalite export {begin.checkpoint} {folder}"
            print(f"megalite: {folder} is NOT made: {error}; by hand: {by_hand}", file=sys.stderr, flush=True)


def _is_intact(begin: Start) -> bool:
    """Whether the digests of its files hold; the ranks of a run look themselves."""
    if begin.checkpoint is None or begin.manifest is None:
        return True
    try:
        for name, recorded in begin.manifest.files.items():
            verify_digest(begin.checkpoint / name, recorded)
    except (CheckpointError, OSError):
        return False
    return True


def describe(config: Config, *, as_json: bool) -> None:
    """The dry run: resolved config, who holds what, parameters per rank."""
    config, _, chosen = settle(config)
    layout, device = resolve(config)
    from launch.layout_table import layout_rows, layout_table

    source = config.training.initialize_from
    begin = _beginning(config) if source is not None and source.exists() else Start()  # a hub id is not downloaded

    rows = layout_rows(config, layout)
    if as_json:
        facts = {"device": device, "config": config.model_dump(mode="json"), "layout": asdict(layout)}
        print(json.dumps(facts | {"ranks": [asdict(row) for row in rows]}, indent=2))
        return
    from rich.console import Console

    print(config.to_yaml())
    Console().print(layout_table(rows, layout))
    for notice in (*chosen, *layout.notices, *begin.notices):
        print(f"megalite: {notice}")
    print(f"dry run on {device}: nothing was started")
