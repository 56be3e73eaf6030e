"""One rank of a run: the entry point, and the run itself: mesh, data, model, engine, loop.

Started by `megalite train`, and by other launchers as

deepspeed --hostfile HOSTFILE launch/train.py CONFIG.yaml [section.option=value ...] [FLAGS]
torchrun --nproc-per-node 8 -m launch.train CONFIG.yaml [section.option=value ...] [FLAGS]
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    if sys.path[0] == str(Path(__file__).resolve().parent):
        del sys.path[0]  # started as a script: this folder's modules must not shadow top-level ones
    from launch.runtime.import_path import exclude_current_folder

    notice = exclude_current_folder()
    from launch.runtime.logs import configure_logging, get_logger
    from launch.runtime.start_witness import witness
    from megalite.resilience.signals import take_signals

    witness.begin(os.environ)
    configure_logging()
    if notice is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        get_logger("launch.train").warning(notice)
    take_signals()  # before the imports below, which take a while

from launch.errors import (
    FAILED_CODE,
    HUNG_CODE,
    INTERRUPTED_CODE,
    PREEMPTED_CODE,
    STOPPED_CODE,
    USER_ERROR_CODE,
    USER_ERRORS,
    LaunchError,
    sentences_of,
)
from launch.runtime.console import Console, keep_output_after_hangup
from launch.runtime.logs import configure_logging, get_logger
from launch.runtime.processes import end_with_parent
from launch.runtime.rank_environment import ATTEMPT, Rank, take_private_environment, this_rank
from launch.runtime.rank_process import be_deterministic, choose_interface, is_unsupervised, log_once, run_to_the_end
from launch.runtime.run_lock import LOCK
from launch.runtime.start_witness import witness
from launch.runtime.startup_progress import StartupProgress
from launch.trainer.attention_summary import format_attention
from launch.trainer.checkpoint_hooks import CheckpointHooks, manifest_maker
from launch.trainer.data.host_copies import open_on_all_hosts
from launch.trainer.data.opening import evaluation_batches, evaluation_targets, open_data, training_batches
from launch.trainer.data.run_mix import MixHistory
from launch.trainer.prediction_tracker import PredictionTracker, look_up_machine, memory_of_ranks
from launch.trainer.run_logger import RunLogger
from launch.trainer.run_summary import log_start
from launch.trainer.start.flags import NO_FLAGS, StartFlags, split_flags
from launch.trainer.start.joining import join_ranks, leave_together, longest_wait_s, lost_rank
from launch.trainer.start.rank_devices import check_memory_of_ranks, devices_of_ranks, format_devices
from launch.trainer.start.resume import RunSetup, agree_on_start, checkpoints_of, load_state
from launch.trainer.start.run_config import load_run_config, with_layout_for_all
from launch.trainer.start.run_folder import RunFolderInUse, lock_run_folder
from megalite.checkpoint.durable_files import NO_ROOM
from megalite.checkpoint.errors import StorageError
from megalite.checkpoint.fence import fence
from megalite.checkpoint.small_files import forbid_writing_by_all
from megalite.config import Config, resolve_layout
from megalite.config.layout import unchecked_layout
from megalite.config.rules.known_bad import check_known_bad, installed_versions
from megalite.config.user_folders import ensure_home
from megalite.distributed.errors import MessageRefused, RendezvousFailed
from megalite.monitor.events import EVENTS, EventLog
from megalite.planner.cost.shapes import recompute_of_blocks
from megalite.resilience.heartbeat import Heartbeat
from megalite.resilience.signals import take_signals
from megalite.training.state import SaveFailed, TrainingInterrupted, TrainingPreempted, TrainingStopped, TrainState
from megalite.units import plural

if TYPE_CHECKING:
    from megalite.engine.engine import Engine

log = get_logger("launch.train")  # as a script this module is named __main__
PROCESS_START_TIME = time.monotonic()
RUN_LOCK_TIMEOUT_S = 100.0  # a file server keeps the lock of a host that has died for its lease; NFS: 90 s
ASKED_TO_END_S = 60.0  # for the mirror, and the exports of a run that is done, when the machine has been asked for
NO_SUPERVISOR = (
    "with `deepspeed` alone on several hosts nobody checks the hosts before, ends ranks that one left behind when it "
    "failed, or starts the run again: `megalite launch --hostfile HOSTFILE CONFIG.yaml` does"
)
ENDINGS: dict[type[Exception], tuple[int, str]] = {
    TrainingStopped: (STOPPED_CODE, "stopped"),
    TrainingPreempted: (PREEMPTED_CODE, "preempted"),
    TrainingInterrupted: (INTERRUPTED_CODE, "interrupted"),
    SaveFailed: (FAILED_CODE, "not saved"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank and returns its exit code. User errors are printed as one line on stderr, once per host."""
    witness.begin(os.environ)
    forbid_writing_by_all()
    ensure_home()
    console = keep_output_after_hangup()
    take_signals()  # until training begins there is nothing to save
    end_with_parent()  # a launcher that is killed takes its ranks along; they save first
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher hands the local rank over a second time, as an argument
    arguments = [argument for argument in arguments if not argument.startswith("--local_rank")]
    exit_stack = ExitStack()
    code = _load_and_run(arguments, console, exit_stack)
    # not closed on an unexpected exception: the heartbeat is left stale on purpose, so that the supervisor notices
    exit_stack.close()
    witness.end()
    return code


def _load_and_run(arguments: Sequence[str], console: Console, exit_stack: ExitStack) -> int:
    """Loads the config and runs it; returns the exit code of a run that ends with one."""
    rank = None
    try:
        take_private_environment(os.environ)
        rank = this_rank()
        if rank is None:
            raise LaunchError("launch.train is one rank of a run: start it with deepspeed or torchrun, or use megalite")
        witness.update(os.environ)
        configure_logging(rank=rank.rank)
        flags, arguments = split_flags(arguments)
        signals = take_signals()
        signals.logs, signals.honors_repeated_signals = rank.local_rank == 0, ATTEMPT not in os.environ
        if not arguments:
            raise LaunchError("no config is given: name a YAML file, as in launch/train.py configs/quickstart.yaml")
        config = load_run_config(Path(arguments[0]), arguments[1:])
        choose_interface(os.environ, rank, config.launch.interface)
        witness.update(os.environ)  # with an address of rank 0 that is this host's own
        _keep_console(console, config, rank)
        with StartupProgress(rank, PROCESS_START_TIME) as progress:
            run(config, rank, exit_stack, progress, flags)
    except USER_ERRORS as error:
        may_pass = isinstance(error, StorageError) and not error.is_lasting
        may_pass |= isinstance(error, RunFolderInUse) and ATTEMPT in os.environ  # by a frozen host of an attempt before
        return _fail(
            "\nmegalite: error: ".join(sentences_of(error)), rank, FAILED_CODE if may_pass else USER_ERROR_CODE
        )
    except (TrainingStopped, TrainingPreempted, SaveFailed) as error:
        code, ending = ENDINGS[type(error)]
        if rank is not None and rank.rank == 0:
            was_asked = isinstance(error, TrainingPreempted)
            log.log(logging.WARNING if was_asked else logging.ERROR, f"{ending}: {error}")
        leave_together()
        return code
    except (MessageRefused, RendezvousFailed) as error:
        return _fail(str(error), rank)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        where = error.filename or "a disk that the run writes to"
        return _fail(f"{where}: {NO_ROOM[error.errno]}: free some space", rank)
    except Exception as error:
        if (lost := lost_rank(error)) and rank is not None:  # which tells the others itself, or its witness does
            log_once(
                f"rank {rank.rank} lost another rank while the run started ({lost}): look at what that one said", rank
            )
            return FAILED_CODE
        witness.fail(FAILED_CODE, f"{type(error).__name__}: {error}")
        raise
    return 0


def _fail(sentence: str, rank: Rank | None, code: int = FAILED_CODE) -> int:
    """Tells the ranks of other hosts, and the user, why this rank fails; returns its exit code."""
    if is_first := rank is None or rank.local_rank == 0:
        log_once(sentence, rank)  # at once: until the others have heard takes seconds
    witness.fail(code, sentence)
    if not is_first:
        log_once(sentence, rank)
    return code


def _keep_console(console: Console, config: Config, rank: Rank) -> None:
    """Sends this rank's output to a file in the run folder once its console has gone."""
    kept = config.run_dir / f"console_rank_{rank.rank}.log"
    if not is_unsupervised(rank):
        console.keep_in(kept)
        return
    # stdout was an ssh pipe; once it closes no launcher remains to stop these ranks
    console.keep_in(kept, when_alone=partial(os.kill, os.getpid(), signal.SIGTERM))
    if rank.rank == 0:
        log.info(NO_SUPERVISOR)


def run(
    config: Config, rank: Rank, exit_stack: ExitStack, progress: StartupProgress, flags: StartFlags = NO_FLAGS
) -> None:
    """Trains on this rank: mesh, data, model, engine, loop.

    `exit_stack` is closed by the caller when the rank leaves as it should. Raises one of `ENDINGS`, or what the user
    has to correct.
    """
    if not config.unresolved_options:
        unchecked_layout(config, rank.world_size)  # refuses another number of ranks before any of them waits
    lock, patience_s = None, RUN_LOCK_TIMEOUT_S if ATTEMPT in os.environ else 0.0
    if rank.rank == 0:
        lock = lock_run_folder(config, patience_s, shared=flags.shared_run_dir)
    heartbeat = _start_heartbeat(config, rank, exit_stack)  # before the long imports
    lookup = None
    if rank.rank == 0 and os.environ.get("DS_ACCELERATOR") == "cpu" and not config.unresolved_options:
        lookup = look_up_machine(rank, on_cpu=True)  # a CPU is measured beside the imports, which leave cores idle
    progress.begin("loading PyTorch and DeepSpeed")
    import torch

    from megalite.distributed.agreement import from_rank_0
    from megalite.engine.build import build_engine
    from megalite.parallel.mesh import Mesh
    from megalite.resilience.watchdog import Watchdog, agree_on_launch
    from megalite.tracing.activity import Activity
    from models.decoder import layers_of

    torch.set_float32_matmul_precision(config.precision.float32_matmul_precision)
    if config.training.deterministic:
        be_deterministic()
    device = join_ranks(config, rank, progress)
    devices = devices_of_ranks(device)
    if config.unresolved_options:
        config = with_layout_for_all(config, rank, devices)
    layout = resolve_layout(config, rank.world_size, device)
    check_known_bad(config, layout, installed_versions(), device)
    memory_warning = check_memory_of_ranks(config, layout, devices, force=flags.force)
    activity = Activity(Mesh.of(layout), rank.rank)
    if heartbeat is not None:
        heartbeat.step = lambda: activity.span.step
    record_hang = partial(EventLog(config.run_dir / EVENTS).write, "hung")
    launch = agree_on_launch()
    fence.begin(config.run_dir / LOCK, from_rank_0(lambda: fence.read(config.run_dir / LOCK), str))
    with_local_data = open_on_all_hosts(config, rank, progress)  # before the watchdog, whose limits are for steps
    progress.begin("opening the data")
    with Watchdog(
        activity, config.watchdog, config.run_dir, launch, HUNG_CODE, record_hang, tuple(ENDINGS)
    ) as watchdog:
        data = open_data(with_local_data)
        prediction = PredictionTracker(config, layout, rank, device, lookup)
        progress.begin("looking for a checkpoint and checking its files")
        start = agree_on_start(config, rank, data, activity, flags)
        config = start.counted(config)
        prediction.count_from(config)
        data = data.from_position(config, start.followed)
        setup = RunSetup(config, layout, rank, data, start)
        if rank.rank == 0:
            log_start(setup, format_devices(devices), memory_warning)
            if device == "cuda":
                log.info(format_attention(config, torch.device(device)))
        progress.begin("building the model")
        engine = build_engine(layers_of(config, recompute_of_blocks(config, layout)), config, layout, activity)
        progress.begin(setup.start.loading)
        state = load_state(engine, setup)
        progress.begin("preparing and computing the first step")
        with RunLogger(setup, prediction, progress) as run_logger:
            hooks = CheckpointHooks(setup, run_logger)
            try:
                state, is_asked_to_end = _train(engine, setup, state, run_logger, hooks)
            except tuple(ENDINGS) as error:
                watchdog.stop()
                # launchers end rank 0 soon after another rank has left with such a code, so all ranks wait for it
                longest_s = ASKED_TO_END_S if isinstance(error, TrainingPreempted) else longest_wait_s()
                hooks.close(is_done=False, at_most_s=longest_s)
                raise
            run_logger.outcome = {"finished": True, **state.model_dump(exclude={"guard", "source_losses"})}
            watchdog.stop()
            leave_together()
            hooks.close(is_done=True, at_most_s=ASKED_TO_END_S if is_asked_to_end else math.inf)
    del lock  # held until here


def _train(
    engine: Engine, setup: RunSetup, state: TrainState, run_logger: RunLogger, hooks: CheckpointHooks
) -> tuple[TrainState, bool]:
    """Builds the dependencies of the training loop, runs it, and logs how it ended.

    Returns the state at the end, and whether the run, now complete, was asked to end as well.
    """
    from megalite.resilience.guards import Guard
    from megalite.resilience.stop_requests import StopRequests
    from megalite.training.checkpoints import Checkpoints
    from megalite.training.loop import EvaluationSet, TrainerContext, train

    config, layout, data = setup.config, setup.layout, setup.data
    replica = engine.coordinate.data_rank

    def batches(state: TrainState) -> Iterator[Any]:
        if not engine.needs_data:
            return itertools.repeat([])
        return training_batches(data, config, layout, replica, MixHistory.of(state.model_dump()))

    checkpoints = Checkpoints(
        engine,
        config.checkpoint,
        checkpoints_of(config),
        run_logger,
        describe=manifest_maker(setup),
        mirror=hooks.mirror,
        exports=hooks.exporter,
        planner=run_logger.interval_planner(),
    )
    guard = Guard(engine, config.guards, data.training.documents)
    guard.restore(state.guard)
    with StopRequests(config.training.max_minutes, PROCESS_START_TIME) as requests:
        context = TrainerContext(
            batches=batches,
            evaluation=[
                EvaluationSet(
                    one.name,
                    evaluation_batches(one, config, layout, replica) if engine.needs_data else [],
                    one.count // (config.training.micro_batch_size * layout.data_parallel_size),
                    evaluation_targets(one, config, layout),
                )
                for one in data.validation
            ],
            guard=guard,
            checkpoints=checkpoints,
            requests=requests,
            observer=run_logger,
        )
        try:
            state = train(engine, config, state, context)
        except (TrainingStopped, TrainingPreempted) as error:
            _end(engine, run_logger, ENDINGS[type(error)][1], checkpoints.wait())
            raise
        _end(engine, run_logger, "ended", checkpoints.wait())
    return state, requests.is_asked


def _end(engine: Engine, run_logger: RunLogger, ending: str, save_blocked_s: float) -> None:
    """Logs the end before all ranks are asked for their memory: one of them may be gone by then."""
    run_logger.on_end(ending, save_blocked_s=save_blocked_s)
    run_logger.log_prediction_error(memory_of_ranks(engine, run_logger.prediction.memory()))


def _start_heartbeat(config: Config, rank: Rank, exit_stack: ExitStack) -> Heartbeat | None:
    """Starts the heartbeat if a supervisor has set an attempt; it stops when `exit_stack` is closed."""
    attempt = os.environ.get(ATTEMPT, "").strip()
    if not attempt:
        return None
    heartbeat = Heartbeat(config.run_dir, rank.rank, rank.world_size, attempt)
    heartbeat.start()

    def stop() -> None:
        heartbeat.stop()
        if heartbeat.failures:
            times = plural(heartbeat.failures, "time")
            log.warning(f"rank {rank.rank} could not write its heartbeat {times}")

    exit_stack.callback(stop)
    return heartbeat


if __name__ == "__main__":
    run_to_the_end(main)
