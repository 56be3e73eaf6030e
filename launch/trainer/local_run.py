"""`megalite train` outside a launcher: checks config, data, checkpoint and memory, then starts the local ranks."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from shlex import join, quote
from types import FrameType
from typing import Any, NoReturn

from launch.errors import INTERRUPTED_CODE, PREEMPTED_CODE, USER_ERROR_CODE, USER_ERRORS, LaunchError
from launch.output import TRAIN_WORD_S, progress_lines
from launch.prediction.prediction import Prediction
from launch.prediction.this_machine import UNMEASURED, Machine, cpu_name, describe_machine
from launch.runtime.devices import gpu_names
from launch.runtime.local_ranks import start_local_ranks
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_result, say
from launch.trainer.checkpoint_hooks import open_mirror, wait_for_mirror
from launch.trainer.run_summary import (
    prediction_facts,
    prediction_lines,
    print_lines,
    run_facts,
    summary_lines,
    warn_of_passed_over,
    warning_of_long_step,
    warning_of_room,
    warning_of_warmup,
)
from launch.trainer.start.checks import CheckedRun, RunPosition, check_start
from launch.trainer.start.flags import NO_FLAGS, StartFlags
from launch.trainer.start.resume import checkpoints_of, exports_of
from launch.trainer.start.run_folder import lock_run_folder
from megalite.checkpoint.durable_files import verify_digest
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import find_latest, read_manifest
from megalite.checkpoint.retention import clean_up
from megalite.config import Config
from megalite.distributed.rank_admission import ATTEMPT
from megalite.monitor.events import EVENTS, EventLog, EventName
from megalite.monitor.progress import format_continuation
from megalite.parallel.mesh import Mesh
from megalite.resilience.signals import START_UP, STOP_SIGNALS, exit_code_for
from megalite.units import plural

log = get_logger(__name__)
CHECKING = "checking data, checkpoint and memory"
SAID_HOW = (USER_ERROR_CODE, PREEMPTED_CODE, INTERRUPTED_CODE)  # exit codes of runs that have said how to go on


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Makes SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 end this process cleanly while it has not started the ranks yet."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        log.warning(f"ended by {signal.Signals(number).name} {START_UP}")
        sys.exit(exit_code_for(number))

    taken = [each for each in STOP_SIGNALS if each != signal.SIGINT and signal.getsignal(each) != signal.SIG_IGN]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:  # not what was there before: launch/__main__.py would say that no step was taken
            signal.signal(number, signal.SIG_DFL)


def start_local_run(config: Config, arguments: Sequence[str], flags: StartFlags = NO_FLAGS) -> int:
    """Checks config, data, checkpoint and memory, then runs the ranks on this machine; returns their exit code."""
    with progress_lines(CHECKING, first_s=TRAIN_WORD_S):
        run = check_start(config, flags)
    if finish_if_complete(run.position):
        return 0
    ranks = plural(run.layout.world_size, "rank")
    for notice in run.notices:
        log.info(notice)
    log.info(f"starting {ranks} on {run.device} ({run.environment_in_words})")
    code = start_local_ranks(Mesh.of(run.layout), run.environment, [*arguments, *run.overrides, *flags.words])
    if code == 0:
        folder, export = quote(str(config.run_dir)), quote(str(config.run_dir / "hf"))
        log.info(
            f"next: `megalite report {folder} --open` shows the run, `megalite evaluate {folder}` scores it, "
            f"`megalite export {folder} {export}` writes it for transformers"
        )
    elif code not in SAID_HOW and config.checkpoint.resume and ATTEMPT not in os.environ:  # else it is started again
        newest, _ = find_latest(checkpoints_of(config))
        log.warning(format_continuation(None if newest is None else read_manifest(newest).step))
    return code


def finish_if_complete(position: RunPosition) -> bool:
    """Returns True if nothing is left to train, after making up for a last export or upload that is missing."""
    config, start = position.config, position.start
    if not position.is_complete:
        return False
    if start.checkpoint is not None and start.manifest is not None:
        try:
            for name, recorded in start.manifest.files.items():
                verify_digest(start.checkpoint / name, recorded)
        except (CheckpointError, OSError):
            return False  # the ranks look for an older checkpoint that is intact
    warn_of_passed_over(start)
    end = f"of {start.step}" if start.step == config.total_steps else f"and the run ends at step {config.total_steps}"
    log.info(f"{start.checkpoint} is at step {start.step} {end}: nothing left to train")
    with suppress(LaunchError, CheckpointError), lock_run_folder(config, shared=True):  # checked by `find_position`
        clean_up(checkpoints_of(config))
    if config.checkpoint.export_hf != "off" and start.checkpoint is not None:
        _export_if_missing(config, start.checkpoint)
    if config.checkpoint.mirror is not None and start.checkpoint is not None:
        _mirror_if_missing(config, config.checkpoint.mirror, start.checkpoint)
    return True


def _export_if_missing(config: Config, checkpoint: Path) -> None:
    """Exports the last checkpoint of a run that was killed while it waited for that export."""
    folder = exports_of(config) / checkpoint.name
    if folder.exists():
        return
    from launch.conversion.huggingface.exporting import export_hugging_face

    log.info(f"exporting it to {folder}")
    with lock_run_folder(config, shared=True):  # checked by `find_position`
        try:
            export_hugging_face(checkpoint, folder, dtype=config.checkpoint.export_hf_dtype)
        except USER_ERRORS as error:  # no failure of the run, whose training is complete
            by_hand = ["megalite", "export", str(checkpoint), str(folder)]
            log.error(f"{folder} is NOT made: {error}; by hand: {join(by_hand)}")


def _mirror_if_missing(config: Config, url: str, checkpoint: Path) -> None:
    """Sends the last checkpoint of a run that ended before its mirror had it."""
    events = EventLog(config.run_dir / EVENTS)

    def tell(event: EventName, sentence: str, facts: dict[str, Any]) -> None:
        log.log(logging.WARNING if event == "mirror_failed" else logging.INFO, sentence)
        events.write(event, **facts)

    with lock_run_folder(config, shared=True):  # checked by `find_position`
        mirror = open_mirror(url, config.checkpoint, tell)
        mirror.on_commit(checkpoint)
        if missing := wait_for_mirror(mirror, config, log.info):  # no failure of the run, whose training is complete
            log.error(missing)


def print_dry_run(config: Config, flags: StartFlags = NO_FLAGS, *, full: bool = False, as_json: bool = False) -> None:
    """Makes the checks of `start_local_run` and prints what would be started. Nothing is created or changed.

    `full` adds the resolved config and the layers of each rank; JSON always has them.
    """
    with progress_lines(CHECKING, first_s=TRAIN_WORD_S):
        run = check_start(config, flags, is_dry=True)
    layout, position = run.layout, run.position
    gpus = f"this machine's GPUs ({', '.join(dict.fromkeys(gpu_names()))})" if run.device != "cpu" else ""
    devices = f"{plural(layout.world_size, 'rank')} on {gpus or f'this CPU ({cpu_name()})'}"
    facts = run_facts(run.config, layout, position.data, position.start, devices)
    prediction = _predict(run)
    predicted = prediction_facts(facts, prediction, run.memory)
    if as_json:
        from launch.trainer.start.layout_table import layout_rows  # with torch

        known = {"device": run.device, "config": run.config.model_dump(mode="json"), "layout": asdict(layout)}
        rows = [asdict(row) for row in layout_rows(run.config, layout)]
        print_result(json.dumps({**known, "summary": facts, "predicted": predicted, "ranks": rows}, indent=2))
        return
    if full:
        from launch.trainer.start.layout_table import layout_rows, layout_table

        print_result(run.config.to_yaml())
        layout_table(layout_rows(run.config, layout), layout).print()
    warn_of_passed_over(position.start)
    print_lines([*summary_lines(facts), *prediction_lines(predicted)])
    for notice in (*run.notices, *layout.notices, *position.data.notices, *position.start.notices):
        log.info(notice)
    long_step = warning_of_long_step(predicted["step_s"] or 0.0, run.config.training.global_batch_size)
    memory = run.memory.warning if run.memory is not None else None
    for warning in filter(None, (memory, warning_of_room(run.config), warning_of_warmup(run.config), long_step)):
        log.warning(warning)
    say(f"dry run on {run.device}: nothing was started")


def _predict(run: CheckedRun) -> Prediction:
    """Predicts a run without measuring this machine, which a first run does."""
    machine: Machine | None = None
    problem = ""
    try:
        machine = describe_machine(run.layout.world_size, on_cpu=run.device == "cpu", limits=UNMEASURED)
    except (LaunchError, ValueError) as error:
        problem = str(error)
    predicted = Prediction.of(run.config, run.layout, machine, problem)
    if run.memory is None:
        return predicted
    return replace(predicted, memory=run.memory.stages)
