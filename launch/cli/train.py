"""The commands `megalite train` and `megalite supervise`, which starts a run again when it fails. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import (
    AllowChange,
    ConfigPath,
    FirstWait,
    Force,
    Grace,
    LongestWait,
    Overrides,
    Restarts,
    SharedRunDir,
    Silence,
)
from launch.errors import LaunchError
from launch.output import TRAIN_WORD_S, progress_lines
from launch.runtime.rank_environment import is_rank
from launch.runtime.started_modules import COMMAND_LINE, python_command
from launch.supervision.supervisor import Policy, supervise_run
from launch.trainer.start.flags import StartFlags
from launch.trainer.start.run_config import load_run_config


def train(
    config_path: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make every check and print a summary of the run; start nothing.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With --dry-run: also print the whole config.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result of --dry-run as JSON.")] = False,
    force: Force = False,
    allow_change: AllowChange = False,
    shared_run_dir: SharedRunDir = False,
    restart: Annotated[
        int, typer.Option(min=0, metavar="N", help="Restart a failed run, up to N times; see supervise.")
    ] = 0,
) -> None:
    """Train a model; resume from the newest checkpoint in the run folder if there is one.

    Starts tensor x pipeline x data x context ranks on this machine; under `deepspeed`, `torchrun`, `srun` or `mpirun`
    it is one of them. Ctrl-C and SIGTERM finish the step and save; a second one ends the run at once.

    Example: `megalite train configs/quickstart.yaml parallel.tensor_parallel_size=1 training.steps=20`
    """
    with progress_lines("loading what training needs", first_s=TRAIN_WORD_S):
        from launch.trainer.local_run import ending_on_signals, print_dry_run, start_local_run
        from megalite.resilience.signals import take_signals

    flags = StartFlags(force, allow_change, shared_run_dir)
    arguments = [str(config_path), *(overrides or [])]
    if dry_run:
        print_dry_run(load_run_config(config_path, overrides or []), flags, full=full, as_json=as_json)
    elif as_json:
        raise LaunchError("--json belongs to --dry-run: a run's results are in metrics.jsonl and receipt.json")
    elif full:
        raise LaunchError("--full belongs to --dry-run: a run writes its whole config to config.yaml in its run_dir")
    elif is_rank():
        take_signals()  # before the imports of a rank, which take a while
        from launch.train import main as rank_main

        if restart:
            raise LaunchError("--restart is not for one rank of a run: put `megalite supervise --` before its launcher")
        raise typer.Exit(rank_main([*arguments, *flags.words]))
    elif restart:
        command = python_command(COMMAND_LINE, "train", *arguments, *flags.words)
        with ending_on_signals():
            raise typer.Exit(supervise_run(command, Policy(restarts=restart)))
    else:
        with ending_on_signals():
            raise typer.Exit(start_local_run(load_run_config(config_path, overrides or []), arguments, flags))


def supervise(
    command: Annotated[
        list[str], typer.Argument(help="Command that starts the run, with its config.", metavar="COMMAND")
    ],
    restarts: Restarts = 5,
    first_wait: FirstWait = 1.0,
    longest_wait: LongestWait = 300.0,
    grace: Grace = 120.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder; default: that of the config named in COMMAND.")
    ] = None,
    silence: Silence = 60.0,
) -> None:
    """Run COMMAND and restart it when it fails; the run resumes from its newest complete checkpoint.

    Does not restart after exit codes 0, 2 (user error), 3 (a guard), 75 (stopped on request) and 130 (Ctrl-C), nor
    when the run fails twice at the same step. Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to the ranks,
    which save and exit; a second Ctrl-C, SIGTERM or SIGHUP ends all processes immediately. No process that COMMAND
    starts outlives it.

    Example: `megalite supervise --restarts 20 -- torchrun --nproc-per-node 8 -m launch.train configs/quickstart.yaml`
    """
    policy = Policy(restarts, first_wait, longest_wait, grace, silence)
    raise typer.Exit(supervise_run(command, policy, run_dir))
