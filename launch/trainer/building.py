"""Builds a rank's run: what it joins, its mesh, data and model, its engine, and what the training loop depends on."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.errors import HUNG_CODE
from launch.runtime.logs import get_logger
from launch.runtime.rank_environment import Rank
from launch.runtime.rank_process import be_deterministic
from launch.runtime.run_lock import LOCK
from launch.runtime.startup_progress import StartupProgress
from launch.trainer.attention_summary import format_attention
from launch.trainer.checkpoint_hooks import CheckpointHooks, manifest_maker
from launch.trainer.data.host_copies import copy_to_all_hosts
from launch.trainer.data.opening import evaluation_batches, evaluation_targets, open_data, training_batches
from launch.trainer.data.run_mix import DataPosition
from launch.trainer.endings import ENDINGS
from launch.trainer.prediction_tracker import PredictionTracker, look_up_machine, memory_of_ranks
from launch.trainer.run_logger import RunLogger
from launch.trainer.run_summary import log_start
from launch.trainer.start.flags import StartFlags
from launch.trainer.start.joining import join_ranks, leave_together, longest_wait_s
from launch.trainer.start.rank_devices import check_memory_of_ranks, devices_of_ranks, format_devices
from launch.trainer.start.resume import RunSetup, agree_on_start, checkpoints_of, load_state
from launch.trainer.start.run_config import with_layout_for_all
from launch.trainer.start.run_folder import lock_run_folder
from megalite.checkpoint.fence import fence
from megalite.config import Config, resolve_layout
from megalite.config.layout import unchecked_layout
from megalite.config.rules.known_bad import check_known_bad, installed_versions
from megalite.distributed.rank_admission import ATTEMPT
from megalite.monitor.events import EVENTS, EventLog
from megalite.planner.cost.stage_parameters import recompute_of_blocks
from megalite.resilience.heartbeat import Heartbeat
from megalite.training.state import TrainState

if TYPE_CHECKING:
    from megalite.engine.engine import Engine
    from megalite.resilience.watchdog import Watchdog
    from megalite.training.loop import TrainerContext

log = get_logger(__name__)
RUN_LOCK_TIMEOUT_S = 100.0  # a file server keeps the lock of a host that has died for its lease; NFS: 90 s
ASKED_TO_END_S = 60.0  # for the mirror, and the exports of a run that is done, when the machine has been asked for


@dataclass(frozen=True)
class BuiltRun:
    """A run that can begin, and what is done at its end."""

    engine: Engine
    setup: RunSetup
    state: TrainState  # that it begins from
    context: TrainerContext
    run_logger: RunLogger
    hooks: CheckpointHooks
    watchdog: Watchdog

    def log_end(self, ending: str) -> None:
        """Logs the end before all ranks are asked for their memory: one of them may be gone by then."""
        self.run_logger.on_end(ending, save_blocked_s=self.context.checkpoints.wait())
        self.run_logger.log_prediction_error(memory_of_ranks(self.engine, self.run_logger.prediction.memory()))

    def leave(self, *, is_asked: bool) -> None:
        """Ends what a run that is not done has started; `is_asked` if the machine is wanted back."""
        self.watchdog.stop()
        # launchers end rank 0 soon after another rank has left with such a code, so all ranks wait for it
        self.hooks.close(is_done=False, at_most_s=ASKED_TO_END_S if is_asked else longest_wait_s())

    def finish(self, state: TrainState) -> None:
        """Leaves the process group after the last step, and waits for what is made of the last checkpoint."""
        self.run_logger.outcome = {"finished": True, **state.model_dump(exclude={"guard", "source_losses"})}
        self.watchdog.stop()
        leave_together()
        self.hooks.close(is_done=True, at_most_s=ASKED_TO_END_S if self.context.requests.is_asked else math.inf)


def build_run(
    config: Config, rank: Rank, flags: StartFlags, progress: StartupProgress, stack: ExitStack, at_exit: ExitStack
) -> BuiltRun:
    """Joins the other ranks and builds all that training needs. Collective.

    What has to end with the run is entered into `stack`; `at_exit` is closed only if the rank leaves as it should.
    Raises what the user has to correct.
    """
    if not config.unresolved_options:
        unchecked_layout(config, rank.world_size)  # refuses another number of ranks before any of them waits
    patience_s = RUN_LOCK_TIMEOUT_S if ATTEMPT in os.environ else 0.0
    if rank.rank == 0:  # locked until the process ends, whatever that takes
        at_exit.callback(lock_run_folder(config, patience_s, shared=flags.shared_run_dir).close)
    heartbeat = _start_heartbeat(config, rank, at_exit)  # before the long imports
    lookup = None
    if rank.rank == 0 and os.environ.get("DS_ACCELERATOR") == "cpu" and not config.unresolved_options:
        lookup = look_up_machine(rank, on_cpu=True)  # a CPU is measured beside the imports, which leave cores idle
    progress.begin("loading PyTorch and DeepSpeed")
    import torch

    from megalite.distributed.agreement import from_rank_0
    from megalite.engine.build import build_engine
    from megalite.parallel.linear import why_fp16_is_slow
    from megalite.parallel.mesh import Mesh
    from megalite.resilience.watchdog import Watchdog, agree_on_launch
    from megalite.tracing.activity import Activity
    from models.decoder import layers_of

    torch.set_float32_matmul_precision(config.precision.float32_matmul_precision)
    if config.training.deterministic:
        be_deterministic()
    device = join_ranks(config, rank, progress)
    devices = devices_of_ranks(device)
    if config.unresolved_options | config.open_options:
        config = with_layout_for_all(config, rank, devices)
    layout = resolve_layout(config, rank.world_size, device)
    check_known_bad(config, layout, installed_versions(), device)
    memory_warning = check_memory_of_ranks(config, layout, devices, force=flags.force)
    activity = Activity(Mesh.of(layout), rank.rank)
    if heartbeat is not None:
        heartbeat.step = lambda: activity.span.step
    events = EventLog(config.run_dir / EVENTS)
    launch_name = agree_on_launch()
    fence.begin(config.run_dir / LOCK, from_rank_0(lambda: fence.read(config.run_dir / LOCK), str))
    config_with_copies = copy_to_all_hosts(config, rank, progress)  # before the watchdog, whose limits are for steps
    progress.begin("opening the data")
    watchdog = stack.enter_context(
        Watchdog(
            *(activity, config.watchdog, config.run_dir, launch_name, HUNG_CODE),
            report=lambda facts: events.write("hung", **facts),
            same_on_all_ranks=tuple(ENDINGS),
        )
    )
    data = open_data(config_with_copies)
    prediction = PredictionTracker(config, layout, rank, device, lookup)
    progress.begin("looking for a checkpoint and checking its files")
    start = agree_on_start(config, rank, data, activity, flags)
    config = start.counted(config, data.training.samples_per_epoch)
    prediction.count_from(config)
    setup = RunSetup(config, layout, rank, data.from_position(config, start.followed), start)
    if rank.rank == 0:
        log_start(setup, format_devices(devices), memory_warning)
        if device == "cuda":
            log.info(format_attention(config, torch.device(device)))
        elif config.precision.dtype == "fp16" and (notice := why_fp16_is_slow()):
            log.warning(notice)
    progress.begin("building the model")
    engine = build_engine(layers_of(config, recompute_of_blocks(config, layout)), config, layout, activity)
    progress.begin(start.loading)
    state = load_state(engine, setup)
    progress.begin("preparing and computing the first step")
    run_logger = stack.enter_context(RunLogger(setup, prediction, progress))
    hooks = CheckpointHooks(setup, run_logger)
    context = _context(engine, setup, state, run_logger, hooks, progress.process_began)
    return BuiltRun(engine, setup, state, context, run_logger, hooks, watchdog)


def _context(
    engine: Engine,
    setup: RunSetup,
    state: TrainState,
    run_logger: RunLogger,
    hooks: CheckpointHooks,
    process_began: float,
) -> TrainerContext:
    """Builds the dependencies of the training loop."""
    from megalite.resilience.guards import Guard
    from megalite.resilience.stop_requests import StopRequests
    from megalite.training.checkpoints import Checkpoints
    from megalite.training.evaluation import EvaluationSet
    from megalite.training.loop import TrainerContext

    config, layout, data = setup.config, setup.layout, setup.data
    replica = engine.coordinate.data_rank

    def batches(state: TrainState) -> Iterator[Any]:
        if not engine.needs_data:
            return itertools.repeat([])
        return training_batches(data, config, layout, replica, DataPosition.of(state.model_dump()))

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
    return TrainerContext(
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
        lacks_evaluation=setup.start.lacks_evaluation,
        guard=guard,
        checkpoints=checkpoints,
        requests=StopRequests(config.training.max_minutes, process_began),
        observer=run_logger,
    )


def _start_heartbeat(config: Config, rank: Rank, at_exit: ExitStack) -> Heartbeat | None:
    """Starts the heartbeat if a supervisor has set an attempt; it stops when `at_exit` is closed."""
    if not (attempt := os.environ.get(ATTEMPT, "").strip()):
        return None
    heartbeat = Heartbeat(config.run_dir, rank.rank, rank.world_size, attempt)
    heartbeat.start()
    at_exit.callback(heartbeat.stop)
    return heartbeat
