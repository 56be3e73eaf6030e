"""One rank of a run: what `deepspeed`, `torchrun` and `megalite train` start. The run in five lines: see `run`.

deepspeed --hostfile HOSTFILE launch/train.py CONFIG.yaml [section.option=value ...]
torchrun --nproc-per-node 8 -m launch.train CONFIG.yaml [section.option=value ...]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and sys.path[0] == str(Path(__file__).resolve().parent):
    del sys.path[0]  # started as a script: this folder's modules must not shadow top-level ones

from launch.console import Console, outlive_readers
from launch.data import RunData, open_data
from launch.devices import Device
from launch.errors import (
    FAILED_CODE,
    HUNG_CODE,
    INTERRUPTED_CODE,
    PREEMPTED_CODE,
    STOPPED_CODE,
    USER_ERROR_CODE,
    USER_ERRORS,
    LaunchError,
)
from launch.exporter import clear_exports
from launch.followers import Followers
from launch.job import open_job
from launch.network import choose_interface
from launch.plan.own_run import OwnRun, Surroundings
from launch.processes import end_with_parent
from launch.rank_environment import Rank, take_private_environment, this_rank
from launch.ranks import be_deterministic, is_left_alone, run_to_the_end, tell_once
from launch.reporter import Reporter
from launch.resume import Start, checkpoints_of, clear_checkpoints, fetch_from_mirror, find_start
from launch.run_config import load_run_config
from launch.run_folder import lock_run_folder
from launch.silence import ATTEMPT
from megalite.checkpoint.files import NO_ROOM
from megalite.checkpoint.storage_errors import StorageError
from megalite.config import Config
from megalite.config.known_bad import check_known_bad, installed_versions
from megalite.monitor.events import EVENTS, EventLog
from megalite.resilience.heartbeat import Heartbeat
from megalite.resilience.signals import PREEMPTION
from megalite.training.errors import SaveFailed, TrainingPreempted, TrainingStopped

if TYPE_CHECKING:
    from megalite.engine.activity import Activity
    from megalite.engine.engine import Engine
    from megalite.training.state import TrainState

BORN = time.monotonic()
LOCK_S = 100.0  # a file server keeps the lock of a host that has died for its lease; NFS: 90 s
PREEMPTED_S = 60.0  # for the mirror, where somebody waits for the machine
PATIENCE = 5 / 6  # of the process group's timeout, which must not pass while others wait for one rank
LEFT_ALONE = (
    "megalite: with `deepspeed` alone on several hosts nobody checks the hosts before, ends ranks that one left behind "
    "when it failed, or starts the run again: `megalite launch --hostfile HOSTFILE CONFIG.yaml` does"
)
ENDINGS: dict[type[Exception], tuple[int, str]] = {
    TrainingStopped: (STOPPED_CODE, "stopped"),
    TrainingPreempted: (PREEMPTED_CODE, "preempted"),
    SaveFailed: (FAILED_CODE, "not saved"),
}


def run(config: Config, rank: Rank, leaving: ExitStack) -> None:
    """Mesh, data, model, engine, loop. `leaving` is closed when the rank leaves as it should."""
    lock = lock_run_folder(config, LOCK_S if ATTEMPT in os.environ else 0.0) if rank.rank == 0 else None
    heart = _start_heart(config, rank, leaving)
    import torch

    from megalite.engine.activity import Activity
    from megalite.engine.distributed import start_distributed
    from megalite.engine.engine import build_engine
    from megalite.parallel.mesh import Mesh
    from megalite.resilience.watchdog import Watchdog, agree_on_launch
    from megalite.training.loop import train
    from models.decoder import decoder_layers

    torch.set_float32_matmul_precision(config.precision.float32_matmul_precision)
    if config.training.deterministic:
        be_deterministic()
    device = start_distributed(rank.local_rank, timedelta(minutes=config.watchdog.timeout_minutes))
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    if config.open:
        config = _with_layout(config, rank, kind)
    layout = config.check_world(rank.world_size, kind)
    check_known_bad(config, layout, installed_versions(), kind)
    activity = Activity(Mesh.of(layout), rank.rank)
    if heart is not None:
        heart.step = lambda: activity.stretch.step
    tell = partial(_tell_hung, config)
    with Watchdog(
        activity, config.watchdog, config.run_dir, agree_on_launch(), HUNG_CODE, tell, tuple(ENDINGS)
    ) as watchdog:
        data = open_data(config)
        own_run = OwnRun(config, layout, Surroundings.of(rank, kind))
        start = _start(config, rank, data, activity)
        engine = build_engine(decoder_layers(config.model, config.recompute.mode), config, layout, activity)
        state = _load(engine, start, data, config)
        with Reporter(config, layout, rank, start, data, own_run) as reporter:
            followers = Followers.open(config, start, reporter) if rank.rank == 0 else Followers()
            try:
                with open_job(engine, config, layout, data, start, state, reporter, followers, BORN) as job:
                    state = train(engine, config, state, job)
            except tuple(ENDINGS) as error:
                watchdog.stop()
                # launchers end rank 0 soon after another rank has left with such a code: all wait with it
                longest_s = PREEMPTED_S if isinstance(error, TrainingPreempted) else _longest_wait_s()
                followers.close(config, reporter, is_done=False, at_most_s=longest_s)
                raise
            reporter.outcome = {"finished": True, **state.model_dump(exclude={"guard"})}
            watchdog.stop()
            _leave_together()
            followers.close(config, reporter, is_done=True)
    del lock  # held until here


def _with_layout(config: Config, rank: Rank, kind: Device) -> Config:
    """Of a config that says `auto`: rank 0 chooses, so that all have the same."""
    import torch

    from launch.plan.automatic import choose_together

    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if kind == "cuda" else None
    chosen = choose_together(config, kind, memory)
    if rank.rank == 0:
        print(f"megalite: {chosen.sentence}", flush=True)
    return config.settled(chosen.options)


def _start_heart(config: Config, rank: Rank, leaving: ExitStack) -> Heartbeat | None:
    """Signs of life for whoever listens: from before the long imports, until this rank has left the others."""
    attempt = os.environ.get(ATTEMPT, "").strip()
    if not attempt:
        return None
    heart = Heartbeat(config.run_dir, rank.rank, rank.world_size, attempt)
    heart.start()

    def stop() -> None:
        heart.stop()
        if heart.failures:
            times = f"{heart.failures} time{'s' * (heart.failures > 1)}"
            print(f"megalite: rank {rank.rank} could not write its sign of life {times}", file=sys.stderr, flush=True)

    leaving.callback(stop)
    return heart


def _tell_hung(config: Config, facts: dict[str, Any]) -> None:
    """On whichever rank explains it."""
    EventLog(config.run_dir / EVENTS).write("hung", **facts)


def _start(config: Config, rank: Rank, data: RunData, activity: Activity) -> Start:
    """Where the run starts: equal on all ranks, files held against the digests that were taken when they were saved."""
    from megalite.checkpoint.digests import newest_intact
    from megalite.engine.activity import Phase
    from megalite.engine.distributed import is_same_on_all_ranks

    activity.begin(Phase.LOADING)
    notices = clear_checkpoints(config) if rank.rank == 0 else ()
    if rank.rank == 0:
        clear_exports(config)
    if not is_same_on_all_ranks(data.training.fingerprint):  # others wait here for rank 0's preparation
        raise LaunchError("the ranks do not see the same data: data.path must be on storage that all hosts share")
    root = checkpoints_of(config)
    own, skipped = newest_intact(root, looked=activity.progress)
    if own is None:
        if rank.rank == 0:
            fetch_from_mirror(config, activity.progress)
        own, skipped = newest_intact(root, looked=activity.progress)
    start = find_start(config, data, own, skipped)
    if not is_same_on_all_ranks(start.hub.fingerprint if start.hub is not None else None):
        raise LaunchError(
            f"the ranks do not see the same model: training.initialize_from {config.training.initialize_from} must be "
            "equal on all hosts"
        )
    return replace(start, notices=(*notices, *start.notices))


def _load(engine: Engine, start: Start, data: RunData, config: Config) -> TrainState:
    """Weights and optimizer into the engine; where the run stands out."""
    from megalite.checkpoint.engine import load_engine
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.training.state import TrainState

    if start.hub is not None:
        load_engine(engine, start.hub.reader, weights_only=True)
    elif start.checkpoint is not None and not start.is_resume:
        load_engine(engine, CheckpointReader(start.checkpoint), weights_only=True)
    elif start.checkpoint is not None and start.manifest is not None:
        load_engine(engine, CheckpointReader(start.checkpoint), weights_only=False)
        return TrainState.model_validate(start.manifest.state)
    return TrainState(data_fingerprint=data.training.fingerprint, seed=config.training.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. What a user can mend is one sentence on stderr, said once per host."""
    console = outlive_readers()
    end_with_parent()  # a launcher that is killed takes its ranks along; they save first
    for number in PREEMPTION:  # until training begins there is nothing to save
        signal.signal(number, lambda *_: os._exit(PREEMPTED_CODE))
    words = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher hands the local rank over a second time, as an argument
    words = [word for word in words if not word.startswith("--local_rank")]
    leaving = ExitStack()
    code = _train(words, console, leaving)  # what it raises leaves the signs of life standing still
    leaving.close()
    return code


def _train(words: Sequence[str], console: Console, leaving: ExitStack) -> int:
    """The exit code of a run that ends with one."""
    rank = None
    try:
        take_private_environment(os.environ)
        rank = this_rank()
        if rank is None:
            raise LaunchError("launch.train is one rank of a run: start it with deepspeed or torchrun, or use megalite")
        if not words:
            raise LaunchError("no config is given: name a YAML file, as in launch/train.py configs/quickstart.yaml")
        config = load_run_config(Path(words[0]), words[1:])
        _look_around(config, rank, console)
        run(config, rank, leaving)
    except USER_ERRORS as error:
        tell_once(str(error), rank)
        may_pass = isinstance(error, StorageError) and not error.is_lasting
        return FAILED_CODE if may_pass else USER_ERROR_CODE
    except (TrainingStopped, TrainingPreempted, SaveFailed) as error:
        code, word = ENDINGS[type(error)]
        if rank is not None and rank.rank == 0:
            print(f"megalite: {word}: {error}", file=sys.stderr, flush=True)
        _leave_together()
        return code
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        tell_once(f"{error.filename}: {NO_ROOM[error.errno]}: free some space", rank)
        return FAILED_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    return 0


def _look_around(config: Config, rank: Rank, console: Console) -> None:
    """What depends on where this rank is, and on who has started it."""
    choose_interface(os.environ, rank)
    kept = config.run_dir / f"console_rank_{rank.rank}.log"
    if not is_left_alone(rank):
        console.keep_in(kept)
        return
    # who read this was ssh: nobody is left who would end ranks on this host
    console.keep_in(kept, when_alone=partial(os.kill, os.getpid(), signal.SIGTERM))
    if rank.rank == 0:
        print(LEFT_ALONE, flush=True)


def _longest_wait_s() -> float:
    """How long the other ranks may wait for this one in a barrier."""
    from megalite.engine.distributed import group_timeout

    return PATIENCE * group_timeout().total_seconds()


def _leave_together() -> None:
    from megalite.engine.distributed import stop_distributed
    from megalite.resilience.watchdog import leave_within

    with leave_within(_longest_wait_s() + 60, HUNG_CODE):
        stop_distributed()


if __name__ == "__main__":
    run_to_the_end(main)
