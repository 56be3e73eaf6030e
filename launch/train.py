"""One rank of a run: config in, exit code out.

Started by `megalite train`, and by other launchers as

deepspeed --hostfile HOSTFILE launch/train.py CONFIG.yaml [section.option=value ...] [FLAGS]
torchrun --nproc-per-node 8 -m launch.train CONFIG.yaml [section.option=value ...] [FLAGS]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

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

from launch.errors import LaunchError
from launch.runtime.console import Console, keep_output_after_hangup
from launch.runtime.logs import configure_logging, get_logger
from launch.runtime.processes import end_with_parent
from launch.runtime.rank_environment import Rank, set_rank_variables, take_private_environment
from launch.runtime.rank_process import choose_interface, is_unsupervised, run_to_the_end
from launch.runtime.start_witness import witness
from launch.runtime.startup_progress import StartupProgress
from launch.trainer.building import build_run
from launch.trainer.endings import ENDINGS, report_ending
from launch.trainer.start.flags import NO_FLAGS, StartFlags, split_flags
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.safe_files import forbid_writing_by_all
from megalite.config import Config
from megalite.config.user_folders import ensure_home
from megalite.distributed.rank_admission import ATTEMPT
from megalite.resilience.signals import take_signals
from megalite.training.state import TrainingPreempted, TrainingStopped

log = get_logger("launch.train")  # as a script this module is named __main__
PROCESS_START_TIME = time.monotonic()
NO_SUPERVISOR = (
    "with `deepspeed` alone on several hosts nobody checks the hosts before, ends ranks that one left behind when it "
    "failed, or starts the run again: `megalite launch --hostfile HOSTFILE CONFIG.yaml` does"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank and returns its exit code. User errors are printed as one line on stderr, once per host."""
    witness.begin(os.environ)
    forbid_writing_by_all()
    ensure_home()
    console = keep_output_after_hangup()
    take_signals()  # until training begins there is nothing to save
    end_with_parent()  # a launcher that is killed takes its ranks along; they save first
    rank, code, at_exit = None, 0, ExitStack()
    try:
        take_private_environment(os.environ)
        if (rank := set_rank_variables()) is None:
            raise LaunchError("launch.train is one rank of a run: start it with deepspeed or torchrun, or use megalite")
        config, flags = _load_config(list(sys.argv[1:] if arguments is None else arguments), rank, console)
        with StartupProgress(rank, PROCESS_START_TIME) as progress:
            run(config, rank, at_exit, progress, flags)
    except Exception as error:
        if (failed := report_ending(error, rank)) is None:
            raise  # and the heartbeat is left stale, so that the supervisor notices
        code = failed
    at_exit.close()
    witness.end()
    return code


def _load_config(arguments: list[str], rank: Rank, console: Console) -> tuple[Config, StartFlags]:
    """Reads what the rank is told, and sends its output to the run folder once its console has gone."""
    witness.update(os.environ)
    configure_logging(rank=rank.rank)
    # DeepSpeed's launcher hands the local rank over a second time, as an argument
    flags, words = split_flags([word for word in arguments if not word.startswith("--local_rank")])
    signals = take_signals()
    signals.logs, signals.honors_repeated_signals = rank.local_rank == 0, ATTEMPT not in os.environ
    if not words:
        raise LaunchError("no config is given: name a YAML file, as in launch/train.py configs/quickstart.yaml")
    config = load_run_config(Path(words[0]), words[1:])
    choose_interface(os.environ, rank, config.launch.interface)
    witness.update(os.environ)  # with an address of rank 0 that is this host's own
    kept = config.run_dir / f"console_rank_{rank.rank}.log"
    if not is_unsupervised(rank):
        console.keep_in(kept)
        return config, flags
    # stdout was an ssh pipe; once it closes no launcher remains to stop these ranks
    console.keep_in(kept, when_alone=partial(os.kill, os.getpid(), signal.SIGTERM))
    if rank.rank == 0:
        log.info(NO_SUPERVISOR)
    return config, flags


def run(
    config: Config, rank: Rank, at_exit: ExitStack, progress: StartupProgress, flags: StartFlags = NO_FLAGS
) -> None:
    """Trains on this rank: builds mesh, data, model and engine, and runs the loop.

    `at_exit` is closed by the caller when the rank leaves as it should. Raises one of `ENDINGS`, or what the user
    has to correct.
    """
    with ExitStack() as stack:
        built = build_run(config, rank, flags, progress, stack, at_exit)
        from megalite.training.loop import train

        try:
            with built.context.requests:
                try:
                    state = train(built.engine, built.setup.config, built.state, built.context)
                except (TrainingStopped, TrainingPreempted) as error:
                    built.log_end(ENDINGS[type(error)][1])
                    raise
                built.log_end("ended")
        except tuple(ENDINGS) as error:
            built.leave(is_asked=isinstance(error, TrainingPreempted))
            raise
        built.finish(state)


if __name__ == "__main__":
    run_to_the_end(main)
