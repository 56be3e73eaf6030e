"""The `megalite` command.

Every command has a `--help` with an example, prints one sentence on stderr for a user error, and has `--json` where a
program reads its result. Exit codes: 0 (done), 1 (verify found a difference), 2 (user error), 3 (a guard stopped the
run), 75 (stopped on request after saving), 86 (the run hung). No torch here.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from pydantic import ValidationError
from typer.exceptions import TyperException

from launch.cli.checkpoint import checkpoint_app
from launch.cli.compare import compare
from launch.cli.config import config_app
from launch.cli.convert import export, import_
from launch.cli.data import data_app
from launch.cli.doctor import doctor
from launch.cli.inference import evaluate, generate
from launch.cli.kubernetes import k8s
from launch.cli.launch import launch
from launch.cli.options import (
    AllowChange,
    AsJson,
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
from launch.cli.place import place
from launch.cli.plan import plan_app
from launch.cli.prepare import prepare
from launch.cli.ray import ray
from launch.cli.report import report
from launch.cli.runs import ls, status
from launch.cli.series import bench, scaling
from launch.cli.slurm import slurm
from launch.cli.trace import trace
from launch.cli.verbosity import CommandsWithVerbosity
from launch.cli.version import show_version
from launch.cli.watch import watch
from launch.errors import (
    FAILED_CODE,
    INTERRUPTED_CODE,
    USER_ERROR_CODE,
    USER_ERRORS,
    VERIFY_FAILED_CODE,
    LaunchError,
    sentences_of,
)
from launch.output import TRAIN_WORD_S, console, print_json, progress_lines
from launch.runtime.logs import get_logger
from launch.runtime.modules import COMMAND_LINE, python_command
from launch.runtime.printing import print_exception, say
from launch.trainer.start.flags import StartFlags
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.durable_files import NO_ROOM
from megalite.checkpoint.safe_files import forbid_writing_by_all
from megalite.config import Config
from megalite.config.errors import expectation, must_be
from megalite.config.foreign_words import answer, rows_of
from megalite.config.loading.hidden_secrets import without_secrets
from megalite.config.suggestions import dotted, option_paths

log = get_logger(__name__)
DASHED_OVERRIDE = re.compile(rf"--(?:run_dir|(?:{'|'.join(Config.model_fields)})\.[a-z_.]+)=")


class AllCommands(CommandsWithVerbosity):
    """All commands; wrong usage and Ctrl-C end any of them with one sentence instead of a page or a traceback."""

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        try:
            code = super().main(*arguments, **options | {"standalone_mode": False})
        except TyperException as error:
            # empty where a command without arguments has shown its help
            if message := error.format_message().removesuffix(".").replace("Value error, ", ""):
                command = getattr(error, "ctx", None)
                message = _in_our_words(error) or message
                where = "" if command is None or message.endswith("?") else f"; see `{command.command_path} --help`"
                log.error(without_secrets(f"{message[0].lower()}{message[1:]}{where}"))  # words as they were typed
            sys.exit(error.exit_code)
        except typer.Abort:
            log.warning("not confirmed: nothing was done")
            sys.exit(FAILED_CODE)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            log.warning("interrupted")
            raise typer.Exit(INTERRUPTED_CODE) from None


app = typer.Typer(
    name="megalite", cls=AllCommands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(plan_app, name="plan")
app.command("import")(import_)
for command in (
    *(export, generate, evaluate, k8s, launch, doctor, slurm, place, prepare, ray, status, ls, trace, report, watch),
    *(compare, bench, scaling),
):
    app.command()(command)


@app.callback()
def options_of_all_commands(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the versions in use and exit."),
    ] = False,
) -> None:
    """Train transformer language models with tensor, pipeline and data parallelism on DeepSpeed engines.

    Example: from text to a trained model, as `make quickstart` does, and a comparison of two layouts:

    - `megalite prepare python-stdlib -t runs/quickstart/tokenizer --train-vocab-size 2048 -o
      runs/quickstart/data/python_stdlib`

    - `megalite train configs/quickstart.yaml`

    - `megalite verify configs/quickstart.yaml --layouts "tp=2;pp=2,accumulation=4"`
    """


@app.command()
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

    Starts tensor x pipeline x data ranks on this machine; under `deepspeed`, `torchrun`, `srun` or `mpirun`
    it is one of them. Ctrl-C and SIGTERM finish the step and save; a second one ends the run at once.

    Example: `megalite train configs/quickstart.yaml parallel.tensor_parallel_size=1 training.steps=20`
    """
    from launch.runtime.rank_environment import is_rank

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
        from launch.supervision.supervisor import Policy, supervise_run

        command = python_command(COMMAND_LINE, "train", *arguments, *flags.words)
        with ending_on_signals():
            raise typer.Exit(supervise_run(command, Policy(restarts=restart)))
    else:
        with ending_on_signals():
            raise typer.Exit(start_local_run(load_run_config(config_path, overrides or []), arguments, flags))


@app.command(context_settings={"allow_interspersed_args": False})
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
    from launch.supervision.supervisor import Policy, supervise_run

    policy = Policy(restarts, first_wait, longest_wait, grace, silence)
    raise typer.Exit(supervise_run(command, policy, run_dir))


@app.command()
def verify(
    config_path: ConfigPath,
    overrides: Overrides = None,
    layouts: Annotated[
        str, typer.Option(help='"auto", or layouts such as "tp=2,pp=2,accumulation=3;dp=2,zero=3".')
    ] = "auto",
    reference: Annotated[
        Literal["transformers", "self"], typer.Option(help="Reference: transformers, or our own serial model (self).")
    ] = "transformers",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each short training run.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Do not shrink a large model.")] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="The config's own layout, with all micro-batches, stages of the run and sources."),
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and batches; default: a random one.")] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which a layout counts as hung; compiled, 300 more.")
    ] = 120.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run; start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify that every layout computes what `transformers` computes in one process, and diagnose those that do not.

    Compares losses, logits, every gradient, weight and moment, clipping and evaluation on this machine's ranks. Exit
    code 0 only if all layouts pass, 1 if one fails. The keys of a layout: tp, pp, dp, zero, sequence_parallel,
    recompute, accumulation, schedule and chunks (of a pipeline), compile.

    Example: `megalite verify configs/quickstart.yaml --layouts "tp=2,pp=2,accumulation=4,schedule=zb-v;dp=2,zero=3"`
    """
    from launch.parity import report as reports
    from launch.parity.verify import make_plan
    from launch.parity.verify import verify as run

    plan = make_plan(
        load_run_config(config_path, overrides or []),
        layouts=layouts,
        reference=reference,
        steps=steps,
        full=full,
        seed=seed,
        timeout_s=timeout,
        deep=deep,
    )
    log_line = console(stderr=True).print
    log_line(reports.introduction(plan))
    if dry_run:
        log_line(f"dry run: {'; '.join(map(str, plan.layouts))}; nothing was started")
        if as_json:
            print_json(reports.plan_as_json(plan))
        return
    try:
        report = run(plan)
    except KeyboardInterrupt:
        log.warning("interrupted; no result")
        raise typer.Exit(INTERRUPTED_CODE) from None
    if as_json:
        print_json(reports.as_json(report))
    else:
        reports.table(report).print()
        say("\n".join(reports.conclusion(report)))
    if not report.passed:
        raise typer.Exit(VERIFY_FAILED_CODE)


def _in_our_words(error: TyperException) -> str | None:
    """Returns what a value of a flag must be; what a flag is that no command has: an option, another stack's word."""
    flag = getattr(error, "param", None)
    if isinstance(error.__cause__, ValidationError) and flag and (detail := error.__cause__.errors()[0]):
        if detail["type"] == "value_error":
            return None
        return f"{flag.opts[0]} {must_be(flag.name, [expectation(detail)], detail['input'])}"
    if flag and flag.param_type_name == "option" and not error.message:  # it is missing
        return f"missing option {' / '.join(flag.opts)}: {flag.help[0].lower()}{flag.help[1:].removesuffix('.')}"
    if (typed := getattr(error, "option_name", None)) is None:
        return None
    name, command = typed.lstrip("-"), getattr(getattr(error, "ctx", None), "command", None)
    takes = any(parameter.name == "overrides" for parameter in getattr(command, "params", ()))
    if tuple(name.split(".")) in option_paths(Config):
        return f"{typed}: an option of the config has no dashes here: {name}=..."
    if found := rows_of(typed):
        options = "; options of the config are set as section.option=value" * takes
        return f"there is no flag {typed}, a word {answer(found)}{options}"
    named = [f"{dotted(path)}=..." for path in option_paths(Config) if takes and path[-1] == name.replace("-", "_")]
    return f"there is no flag {typed}: options of the config are set as {' or '.join(named[:3])}" if named else None


def _refuse_dashed_overrides(words: list[str]) -> None:
    """Raises LaunchError for an override with dashes in front, as other stacks write options of a config."""
    for word in words:
        if word in ("--", "supervise"):  # what follows may be another program's
            return
        if DASHED_OVERRIDE.match(word):
            shown = without_secrets(word)
            raise LaunchError(f"{shown}: an option of the config has no dashes here: {shown.lstrip('-')}")


def main() -> None:
    """Entry of the `megalite` command."""
    forbid_writing_by_all()
    sys.excepthook = print_exception
    try:
        try:
            _refuse_dashed_overrides(sys.argv[1:])
            app(prog_name="megalite")  # also for `python -m launch`
        finally:
            sys.stdout.flush()  # here, where an error can be told
    except USER_ERRORS as error:
        for sentence in sentences_of(error):
            log.error(sentence)
        sys.exit(USER_ERROR_CODE)
    except OSError as error:
        if error.filename is not None:
            why = NO_ROOM.get(error.errno or 0)
            told = f"{why}: free some space" if why else f"{error.strerror}: check the path and your rights to it"
            log.error(f"{error.filename}: {told}")
        elif error.errno in (*NO_ROOM, errno.EPIPE):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
            if error.errno != errno.EPIPE:  # whoever read it has seen enough
                log.error(f"standard output cannot be written: {error.strerror}: send it elsewhere")
        else:
            raise
        sys.exit(USER_ERROR_CODE)
