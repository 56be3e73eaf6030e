"""Entry point of one rank, started by `deepspeed`, `torchrun` and `megalite train`; the run itself: launch.trainer.run.

deepspeed --hostfile HOSTFILE launch/train.py CONFIG.yaml [section.option=value ...]
torchrun --nproc-per-node 8 -m launch.train CONFIG.yaml [section.option=value ...]
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

if __name__ == "__main__" and sys.path[0] == str(Path(__file__).resolve().parent):
    del sys.path[0]  # started as a script: this folder's modules must not shadow top-level ones

from launch.errors import FAILED_CODE, INTERRUPTED_CODE, PREEMPTED_CODE, USER_ERROR_CODE, USER_ERRORS, LaunchError
from launch.runtime.console import Console, outlive_readers
from launch.runtime.logs import configure_logging, get_logger
from launch.runtime.processes import end_with_parent
from launch.runtime.rank_environment import Rank, take_private_environment, this_rank
from launch.runtime.rank_process import choose_interface, is_unsupervised, run_to_the_end, tell_once
from launch.trainer.run import ENDINGS, leave_together, run
from launch.trainer.run_config import load_run_config
from megalite.checkpoint.durable_files import NO_ROOM
from megalite.checkpoint.errors import StorageError
from megalite.config import Config
from megalite.resilience.signals import PREEMPTION
from megalite.training.errors import SaveFailed, TrainingPreempted, TrainingStopped

log = get_logger("launch.train")  # as a script this module is named __main__
NO_SUPERVISOR = (
    "with `deepspeed` alone on several hosts nobody checks the hosts before, ends ranks that one left behind when it "
    "failed, or starts the run again: `megalite launch --hostfile HOSTFILE CONFIG.yaml` does"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank and returns its exit code. User errors are printed as one line on stderr, once per host."""
    console = outlive_readers()
    end_with_parent()  # a launcher that is killed takes its ranks along; they save first
    for number in PREEMPTION:  # until training begins there is nothing to save
        signal.signal(number, lambda *_: os._exit(PREEMPTED_CODE))
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher hands the local rank over a second time, as an argument
    arguments = [argument for argument in arguments if not argument.startswith("--local_rank")]
    exit_stack = ExitStack()
    code = _train(arguments, console, exit_stack)
    # not closed on an unexpected exception: the heartbeat is left stale on purpose, so that the supervisor notices
    exit_stack.close()
    return code


def _train(arguments: Sequence[str], console: Console, exit_stack: ExitStack) -> int:
    """Loads the config and runs it; returns the exit code of a run that ends with one."""
    rank = None
    try:
        take_private_environment(os.environ)
        rank = this_rank()
        if rank is None:
            raise LaunchError("launch.train is one rank of a run: start it with deepspeed or torchrun, or use megalite")
        configure_logging(rank=rank.rank)
        if not arguments:
            raise LaunchError("no config is given: name a YAML file, as in launch/train.py configs/quickstart.yaml")
        config = load_run_config(Path(arguments[0]), arguments[1:])
        choose_interface(os.environ, rank)
        _keep_console(console, config, rank)
        run(config, rank, exit_stack)
    except USER_ERRORS as error:
        tell_once(str(error), rank)
        may_pass = isinstance(error, StorageError) and not error.is_lasting
        return FAILED_CODE if may_pass else USER_ERROR_CODE
    except (TrainingStopped, TrainingPreempted, SaveFailed) as error:
        code, ending = ENDINGS[type(error)]
        if rank is not None and rank.rank == 0:
            log.log(logging.WARNING if code == PREEMPTED_CODE else logging.ERROR, f"{ending}: {error}")
        leave_together()
        return code
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        tell_once(f"{error.filename}: {NO_ROOM[error.errno]}: free some space", rank)
        return FAILED_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    return 0


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


if __name__ == "__main__":
    run_to_the_end(main)
