"""The `megalite` command. Its contract: --help with an example, one sentence on stderr for a mistake, exit codes
0 (done), 1 (verify found a difference), 2 (the user's mistake), 3 (a guard stopped the run), 75 (asked to end, saved),
86 (it hung), --json where a program reads the result. No torch here.
"""

from __future__ import annotations

import enum
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.arguments import AsJson, ConfigPath, Overrides
from launch.checkpoint_command import checkpoint_app
from launch.convert_command import export, import_
from launch.doctor_command import doctor
from launch.errors import INTERRUPTED_CODE, USER_ERROR_CODE, USER_ERRORS, VERIFY_FAILED_CODE, LaunchError
from launch.inference_command import evaluate, generate
from launch.k8s_command import k8s
from launch.launch_command import launch
from launch.place_command import place
from launch.plan.app import plan_app
from launch.ray_command import ray
from launch.run_config import load_run_config
from launch.slurm_command import slurm
from megalite.config import Config

app = typer.Typer(
    name="megalite",
    help="Train transformer language models with tensor, pipeline and data parallelism on DeepSpeed engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
config_app = typer.Typer(help="Show a config as it is resolved, or the schema of all options.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(plan_app, name="plan")
app.command("import")(import_)
app.command()(export)
app.command()(generate)
app.command()(evaluate)
app.command()(k8s)
app.command()(launch)
app.command()(doctor)
app.command()(slurm)
app.command()(place)
app.command()(ray)


class ReferenceName(enum.StrEnum):
    """What `megalite verify` measures layouts against."""

    TRANSFORMERS = "transformers"
    SELF = "self"


@app.command()
def train(
    config_path: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print config and layout; start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print them as JSON.")] = False,
    restart: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start a run that fails again, up to N times; see supervise.")
    ] = 0,
) -> None:
    """Train, or go on training from the newest checkpoint in the run's folder.

    Starts tensor x pipeline x data local ranks; under `deepspeed`, `torchrun`, `srun` or `mpirun` it is one of them.

    Example: `megalite train configs/quickstart.yaml parallel.tensor_parallel_size=1 training.steps=20`
    """
    from launch.rank_environment import is_rank
    from launch.start import describe, start

    words = [str(config_path), *(overrides or [])]
    if dry_run:
        describe(load_run_config(config_path, overrides or []), as_json=as_json)
    elif as_json:
        raise LaunchError("--json belongs to --dry-run: a run's results are in metrics.jsonl and receipt.json")
    elif is_rank():
        from launch.train import main as rank_main

        if restart:
            raise LaunchError("--restart is not for one rank of a run: put `megalite supervise --` before its launcher")
        raise typer.Exit(rank_main(words))
    elif restart:
        from launch.supervise import Policy, supervise_run

        command = [sys.executable, "-m", "launch", "train", *words]
        raise typer.Exit(supervise_run(command, Policy(restarts=restart)))
    else:
        raise typer.Exit(start(load_run_config(config_path, overrides or []), words))


@app.command(context_settings={"allow_interspersed_args": False})
def supervise(
    command: Annotated[list[str], typer.Argument(help="What starts the run, with its config.", metavar="COMMAND")],
    restarts: Annotated[int, typer.Option(min=0, help="Restarts at most.")] = 5,
    first_wait: Annotated[float, typer.Option(min=0, help="Seconds before the first restart; doubles.")] = 1.0,
    longest_wait: Annotated[float, typer.Option(min=0, help="Seconds before a restart at most.")] = 300.0,
    grace: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds from SIGTERM or SIGHUP until what still runs is killed; SIGUSR1 sets no limit."
        ),
    ] = 120.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="The run's folder; default: that of the config which COMMAND names.")
    ] = None,
    silence: Annotated[
        float, typer.Option(min=0, help="Seconds without a sign of life from a rank until all start again; 0: never.")
    ] = 60.0,
) -> None:
    """Run COMMAND, and again when it fails; the run resumes from its newest complete checkpoint.

    Not after exit codes 0, 2 (a mistake), 3 (a guard), 75 (asked to end, saved) and 130 (Ctrl-C), nor when it fails
    twice at the same step. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the ranks, which save and end; Ctrl-C,
    and any of SIGTERM and SIGHUP a second time, ends all at once. Nothing that COMMAND starts outlives it.

    Example: `megalite supervise --restarts 20 -- torchrun --nproc-per-node 8 -m launch.train configs/quickstart.yaml`
    """
    from launch.supervise import Policy, supervise_run

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
        ReferenceName, typer.Option(help="What is right: transformers, or our own serial model (self).")
    ] = ReferenceName.TRANSFORMERS,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each short training.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Do not make a large model smaller.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeat a run; default: new weights and batches.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until a layout counts as hung.")] = 120.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run; start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that every layout computes what `transformers` computes on one process, and say why where one does not.

    Compares losses, logits, every gradient, weight and moment, clipping and evaluation on this machine's ranks. Exit
    code 0 only if all layouts pass, 1 if one fails. The words of a layout: tp, pp, dp, zero, sequence_parallel,
    recompute, accumulation.

    Example: `megalite verify configs/quickstart.yaml --layouts "tp=2,pp=2,accumulation=3;dp=2,zero=3"`
    """
    from rich.console import Console

    from launch.verify import report as reports
    from launch.verify.command import make_plan
    from launch.verify.command import verify as run

    plan = make_plan(
        load_run_config(config_path, overrides or []),
        layouts=layouts,
        reference=reference.value,
        steps=steps,
        full=full,
        seed=seed,
        timeout_s=timeout,
    )
    say = Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print
    say(reports.introduction(plan))
    if dry_run:
        say(f"dry run: {'; '.join(map(str, plan.layouts))}; nothing was started")
        if as_json:
            _print_json(reports.plan_as_json(plan))
        return
    try:
        report = run(plan, say)
    except KeyboardInterrupt:
        say("megalite: interrupted; no verdict")
        raise typer.Exit(INTERRUPTED_CODE) from None
    if as_json:
        _print_json(reports.as_json(report))
    else:
        Console(width=None if sys.stdout.isatty() else reports.WIDTH).print(reports.table(report))
        print("\n".join(reports.conclusion(report)))
    if not report.passed:
        raise typer.Exit(VERIFY_FAILED_CODE)


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(help="Text files, folders, globs, .jsonl(.gz), dataset:NAME[:SPLIT], or python-stdlib."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Prefix of the files to write.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", "-t", help="Folder with a tokenizer.json.")],
    train_vocab_size: Annotated[
        int | None,
        typer.Option("--train-vocab-size", help="First train a byte-level BPE of this size into --tokenizer."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text in .jsonl and datasets.")] = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: all cores.")] = None,
    append_eos: Annotated[bool, typer.Option(help="End every document with the tokenizer's end token.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn text into memory-mapped token shards (Megatron's .bin/.idx). Interrupted, it goes on where it was.

    Example: `megalite prepare "corpus/**/*.md" -t my_tokenizer -o data/corpus`
    """
    from launch.prepare import prepare_data

    summary = prepare_data(
        sources,
        output,
        tokenizer,
        train_vocab_size=train_vocab_size,
        text_field=text_field,
        workers=workers,
        append_eos=append_eos,
        dry_run=dry_run,
        quiet=as_json,
    )
    if as_json:
        _print_json(asdict(summary))


@config_app.command()
def show(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the config with every default filled in.

    Example: `megalite config show configs/quickstart.yaml training.steps=20`
    """
    config = load_run_config(config_path, overrides or [])
    if as_json:
        _print_json(config.model_dump(mode="json"))
    else:
        print(config.to_yaml(), end="")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of all options, for editors.

    Example: `megalite config schema > megalite.schema.json`
    """
    _print_json(Config.json_schema())


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def main() -> None:
    """Entry of the `megalite` command."""
    try:
        app()
    except USER_ERRORS as error:
        print(f"megalite: error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_CODE)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"megalite: error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(USER_ERROR_CODE)
