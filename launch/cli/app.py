"""The `megalite` command: all its commands, and how any of them ends.

Every command has a `--help` with an example, prints one sentence on stderr for a user error, and has `--json` where a
program reads its result. Exit codes: 0 (done), 1 (verify found a difference), 2 (user error), 3 (a guard stopped the
run), 75 (stopped on request after saving), 86 (the run hung). No torch here.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_group

from launch.cli.verbosity import add_verbosity
from launch.cli.version import show_version
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_exception
from megalite.checkpoint.safe_files import forbid_writing_by_all
from megalite.resilience.signals import INTERRUPTED_CODE

log = get_logger(__name__)
HELPS = """
config: Write a first config, or one from another stack's files; show one with its defaults; explain options.
prepare: Tokenize text into memory-mapped files (Megatron's .bin/.idx). An interrupted run continues where it stopped.
data: Check, pack and fetch prepared data, plan what a run reads of it, and say what its steps have read.
train: Train a model; resume from the newest checkpoint in the run folder if there is one.
supervise: Run COMMAND and restart it when it fails; the run resumes from its newest complete checkpoint.
launch: Train on the hosts of a hostfile, or resume training there.
slurm: Write a Slurm batch script for a run, or --submit it.
k8s: Write Kubernetes manifests for a run, or --submit them.
ray: Train on Ray workers, one rank each, or resume training there. Needs `pip install megalite[ray]`.
doctor: Check this machine, or all hosts of a hostfile, for problems that would prevent a run; start nothing.
status: Print the state of a run: whether it lives, its step and loss, time left, last checkpoint, last events.
ls: List the runs in a folder and its subfolders: state, step, loss, layout, last activity, size of the checkpoints.
watch: Show a run while it trains: the page of `megalite report`, which grows, or with --terminal lines on the terminal.
report: Write one page about a run: curves, where its steps' time went, a step on all ranks, memory, goodput, settings.
trace: Write what all ranks did in a step as one Chrome trace, for ui.perfetto.dev; or tell why it took so long.
compare: Compare runs: where their losses part, which is faster, which parts of a step and which options differ.
bench: Measure variants of a config against each other on this machine: which value of an option is fastest.
scaling: Measure how a config scales over ranks: efficiency, predicted beside measured, and where the loss goes by part.
plan: Predict memory, speed and failures before a launch.
place: Choose hosts and their order for a layout so that little traffic crosses hosts and switches; start nothing.
verify: Verify that every layout computes what `transformers` computes in one process, and diagnose those that do not.
checkpoint: List, inspect, verify, compare and delete checkpoints of any layout.
import: Turn a Hugging Face model into a checkpoint that any layout starts from (`training.initialize_from`).
export: Turn a checkpoint of any layout into a Hugging Face folder for `transformers`; adapters into one for `peft`.
generate: Continue prompts, one after another; streams the text to stdout and reports the speed on stderr.
evaluate: Compute the loss, the perplexity and, for text, the bits per byte of a model.
"""
"""All commands in the order of the list, with the first paragraph of the help of each, which a test holds against this.
The module of a command is imported when it runs, and none for `megalite --help`."""
COMMANDS = dict(line.split(": ", 1) for line in HELPS.split("\n")[1:-1])
FILES = {"k8s": "kubernetes", "supervise": "train"} | dict.fromkeys(("import", "export"), "convert")
FILES |= dict.fromkeys(("generate", "evaluate"), "inference") | dict.fromkeys(("status", "ls"), "runs")
FILES |= dict.fromkeys(("bench", "scaling"), "series")
"""Modules in this folder of commands that are not in one of their own name."""
DASHED_OVERRIDE = re.compile(r"--(run_dir|[a-z0-9_]+\.[a-z_.]+)=")


class AllCommands(TyperGroup):
    """All commands; wrong usage and Ctrl-C end any of them with one sentence instead of a page or a traceback."""

    def __init__(self, **attributes: Any) -> None:
        listed = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}
        super().__init__(**attributes | {"commands": listed})
        add_verbosity(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        try:
            code = super().main(*arguments, **options | {"standalone_mode": False})
        except TyperException as error:
            from launch.cli.mistakes import usage_mistake

            if told := usage_mistake(error):
                log.error(told)
            sys.exit(error.exit_code)
        except typer.Abort:
            from launch.errors import FAILED_CODE

            log.warning("not confirmed: nothing was done")
            sys.exit(FAILED_CODE)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            log.warning("interrupted")
            raise typer.Exit(INTERRUPTED_CODE) from None


def load(name: str) -> Any:
    """Imports a command or a group of them, and returns it."""
    module = import_module(f"launch.cli.{FILES.get(name, name)}")
    alone = typer.Typer(rich_markup_mode="markdown")
    if group := getattr(module, f"{name}_app", None):
        alone.add_typer(group, name=name)
    else:  # what follows `supervise` is another command's
        settings = {"allow_interspersed_args": name != "supervise"}
        alone.command(name, context_settings=settings)(getattr(module, "import_" if name == "import" else name))
    command = get_group(alone).commands[name]
    command.help = command.help or COMMANDS[name]  # most groups have no other
    add_verbosity(command)
    return command


app = typer.Typer(
    name="megalite", cls=AllCommands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


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


def main() -> None:
    """Entry of the `megalite` command."""
    forbid_writing_by_all()
    sys.excepthook = print_exception
    try:
        try:
            for word in sys.argv[1:]:
                if word in ("--", "supervise"):  # what follows may be another program's
                    break
                if DASHED_OVERRIDE.match(word):
                    from launch.cli.mistakes import refuse_dashed_override

                    refuse_dashed_override(word)
            app(prog_name="megalite")  # also for `python -m launch`
        finally:
            sys.stdout.flush()  # here, where an error can be told
    except Exception as error:
        from launch.cli.mistakes import code_of

        if (code := code_of(error)) is None:
            raise
        sys.exit(code)
