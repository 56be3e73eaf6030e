"""`megalite checkpoint ls|show|verify|diff|prune`: the words of the command line; what they do is in checkpoint_tools.

Exit codes: 0 done, good or equal; 1 something is wrong, or different; 2 the user's mistake. No torch for ls and show.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.arguments import AsJson
from launch.errors import VERIFY_FAILED_CODE, LaunchError

if TYPE_CHECKING:
    from rich.table import Table

    from launch.checkpoint_tools.pruning import PrunePlan

WIDTH = 160  # of a table that goes to a file or a pipe

checkpoint_app = typer.Typer(
    help="List, inspect, verify, compare and delete checkpoints of any layout.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Place = Annotated[
    str, typer.Argument(help="Run folder, folder of checkpoints, or one checkpoint; a path or a URL.", metavar="DIR")
]
LocalPlace = Annotated[str, typer.Argument(help="Run folder, folder of checkpoints, or one checkpoint.", metavar="DIR")]


@checkpoint_app.command("ls")
def list_(place: Place, as_json: AsJson = False) -> None:
    """List checkpoints: step, age, size, layout that wrote it, evaluation loss, whether it is complete or why not.

    Example: `megalite checkpoint ls runs/quickstart`
    """
    from launch.checkpoint_tools import report
    from launch.checkpoint_tools.listing import list_place

    listing = list_place(place)
    rows = listing.rows(datetime.now(UTC))
    if as_json:
        _print_json({"place": place, "checkpoints": report.as_json(rows), "left_overs": list(listing.left_overs)})
        return
    _print_table(report.listing_table(rows))
    _print_lines(*report.left_overs_lines(listing.left_overs))


@checkpoint_app.command()
def show(
    place: Annotated[
        str, typer.Argument(help="Checkpoint, or run folder: its newest; a path or a URL.", metavar="CHECKPOINT")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shape.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds: progress, position in the data, optimizer, config in short, files.

    Example: `megalite checkpoint show runs/quickstart/checkpoints/step_00000100 --tensors`
    """
    from launch.checkpoint_tools import report
    from launch.checkpoint_tools.facts import age_seconds, facts_of
    from launch.checkpoint_tools.listing import newest_complete

    url, manifest, passed_over = newest_complete(place)
    facts = facts_of(manifest)
    if as_json:
        names = {"tensor_shapes": report.as_json(manifest.tensors)} if tensors else {}
        _print_json({"url": url, **report.as_json(facts), **names})
        return
    _print_lines(*(f"passed over: {why}" for why in passed_over))
    _print_lines(*report.facts_lines(url, facts, age_seconds(manifest, datetime.now(UTC))))
    _print_table(report.files_table(facts))
    if tensors:
        _print_table(report.tensors_table(manifest.tensors))


@checkpoint_app.command()
def verify(
    place: LocalPlace,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: each file's SHA-256, and that all numbers are finite.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check checkpoints: manifest, sizes, headers, and that every number of every tensor is stored exactly once.

    Prints a line per problem. Exit code 0 only if there is none, 1 if there is one.

    Example: `megalite checkpoint verify runs/quickstart --deep`
    """
    from launch.checkpoint_tools import report
    from launch.checkpoint_tools.listing import local_folders

    folders = local_folders(place)
    from launch.checkpoint_tools.verification import bytes_to_read, verify_checkpoint  # with torch: after mistakes

    with _progress("reading", sum(map(bytes_to_read, folders)) if deep else 0) as advance:
        verdicts = [verify_checkpoint(folder, deep=deep, advance=advance) for folder in folders]
    passed = all(verdict.passed for verdict in verdicts)
    if as_json:
        _print_json({"passed": passed, "deep": deep, "checkpoints": report.as_json(verdicts)})
    else:
        _print_lines(*report.verification_lines(verdicts, deep=deep))
    if not passed:
        raise typer.Exit(VERIFY_FAILED_CODE)


@checkpoint_app.command()
def diff(
    first: Annotated[str, typer.Argument(help="Checkpoint, or run folder: its newest.", metavar="A")],
    second: Annotated[str, typer.Argument(help="The other one, of any layout.", metavar="B")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="What counts as equal, relative to a tensor's largest number.")
    ] = 0.0,
    everything: Annotated[bool, typer.Option("--all", help="Show all that differs, not the worst.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by canonical name, whatever their layouts: weights, moments, progress and config.

    Exit code 0 if a run would go on from either alike, 1 if not. Config and layout are shown, but may differ.

    Example: `megalite checkpoint diff runs/a runs/b/checkpoints/step_00000100 --tolerance 1e-6`
    """
    from launch.checkpoint_tools import report
    from launch.checkpoint_tools.difference import difference, numbers_in_common
    from launch.checkpoint_tools.listing import local_path
    from megalite.checkpoint.reader import open_checkpoint

    left, right = (open_checkpoint(local_path(place)) for place in (first, second))
    with _progress("comparing", 4 * numbers_in_common(left.manifest, right.manifest)) as advance:
        found = difference(left, right, advance=lambda numbers: advance(4 * numbers))
    equal = found.is_equal(tolerance)
    if as_json:
        _print_json({"equal": equal, "tolerance": tolerance, **report.as_json(found)})
    else:
        if any(tensor.different for tensor in found.tensors):
            _print_table(report.difference_table(found, tolerance, everything=everything))
        _print_lines(*report.difference_lines(found, tolerance, everything=everything))
    if not equal:
        raise typer.Exit(VERIFY_FAILED_CODE)


@checkpoint_app.command()
def prune(
    place: Annotated[str, typer.Argument(help="Run folder, or folder of checkpoints.", metavar="DIR")],
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest stay.")],
    keep_every: Annotated[int, typer.Option(min=0, help="Steps that are a multiple of this stay; 0: none.")] = 0,
    keep_best: Annotated[int, typer.Option(min=0, help="How many of the lowest evaluation loss stay.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints that no rule keeps, and what interrupted saves left; never the newest complete one.

    Shows what goes and what stays and why, and asks. Not while a run is using the folder.

    Example: `megalite checkpoint prune runs/quickstart --keep-last 3 --keep-every 1000 --dry-run`
    """
    from launch.checkpoint_tools.pruning import carry_out, no_run_in, plan_prune
    from megalite.checkpoint.retention import Retention

    policy = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    if dry_run:
        _tell_plan(plan_prune(place, policy), as_json, done=False)
        return
    if not yes and (as_json or not sys.stdin.isatty()):
        raise LaunchError("prune asks before it deletes, and there is nobody to ask: add --yes, or --dry-run to look")
    with no_run_in(place):
        plan = plan_prune(place, policy)
        if not as_json:
            _tell_plan(plan, as_json, done=False)
        if not plan.is_empty:
            if not yes:
                typer.confirm("Delete them?", abort=True, err=True)
            carry_out(plan, policy)
    if as_json:
        _tell_plan(plan, as_json, done=True)
    elif not plan.is_empty:
        print("deleted")


def _tell_plan(plan: PrunePlan, as_json: bool, *, done: bool) -> None:
    from launch.checkpoint_tools import report

    if as_json:
        _print_json({"deleted": done and not plan.is_empty, **report.as_json(plan)})
        return
    _print_table(report.prune_table(plan))
    _print_lines(*report.prune_lines(plan))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one, while bytes are read; nothing for `total` 0."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (total and console.is_terminal)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


def _print_table(table: Table) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _print_lines(*lines: str) -> None:
    for line in lines:
        print(line)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
