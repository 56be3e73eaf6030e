"""The `megalite` command: all its commands, and how any of them ends.

Every command has a `--help` with an example, prints one sentence on stderr for a user error, and has `--json` where a
program reads its result. Exit codes: 0 (done), 1 (verify found a difference), 2 (user error), 3 (a guard stopped the
run), 75 (stopped on request after saving), 86 (the run hung). No torch here.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Annotated, Any, NoReturn

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
from launch.cli.place import place
from launch.cli.plan import plan_app
from launch.cli.prepare import prepare
from launch.cli.ray import ray
from launch.cli.report import report
from launch.cli.runs import ls, status
from launch.cli.series import bench, scaling
from launch.cli.slurm import slurm
from launch.cli.trace import trace
from launch.cli.train import supervise, train
from launch.cli.verbosity import CommandsWithVerbosity
from launch.cli.verify import verify
from launch.cli.version import show_version
from launch.cli.watch import watch
from launch.errors import FAILED_CODE, INTERRUPTED_CODE, USER_ERROR_CODE, USER_ERRORS, LaunchError, sentences_of
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_exception
from megalite.checkpoint.durable_files import NO_ROOM
from megalite.checkpoint.safe_files import forbid_writing_by_all
from megalite.config import Config
from megalite.config.errors import expectation, must_be
from megalite.config.foreign_words import answer, rows_of
from megalite.config.loading.secrets_in_text import without_secrets
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
    *(compare, bench, scaling, train),
):
    app.command()(command)
app.command(context_settings={"allow_interspersed_args": False})(supervise)  # what follows is another command's
app.command()(verify)


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
