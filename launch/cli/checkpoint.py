"""The commands `megalite checkpoint ls|show|verify|diff|prune`; launch/checkpoints implements them.

Exit codes: 0 done, intact or equal; 1 damaged or different; 2 user error. `ls` and `show` import no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from launch.checkpoints import report
from launch.checkpoints.listing import checkpoints_in, list_place, local_path, newest_complete
from launch.checkpoints.pruning import carry_out, keep_runs_out_of, plan_prune
from launch.checkpoints.summary import age_seconds, summarize_checkpoint, summarize_folder
from launch.cli.options import AsJson
from launch.errors import VERIFY_FAILED_CODE, LaunchError
from launch.output import print_json, progress_bar
from launch.runtime.printing import say
from megalite.checkpoint.retention import Retention

checkpoint_app = typer.Typer(no_args_is_help=True)

Place = Annotated[
    str, typer.Argument(help="Run folder, folder of checkpoints, or one checkpoint; a path or a URL.", metavar="DIR")
]
LocalPlace = Annotated[str, typer.Argument(help="Run folder, folder of checkpoints, or one checkpoint.", metavar="DIR")]


@checkpoint_app.command("ls")
def list_(place: Place, as_json: AsJson = False) -> None:
    """List checkpoints: step, age, size, layout, evaluation loss, and whether each is complete.

    Example: `megalite checkpoint ls runs/quickstart`
    """
    listing = list_place(place)
    folders = [summarize_folder(listed, listing.latest, datetime.now(UTC)) for listed in listing.checkpoints]
    if as_json:
        print_json({"place": place, "checkpoints": report.as_json(folders), "left_overs": listing.left_overs})
        return
    report.listing_table(folders).print()
    for line in report.left_overs_lines(listing.left_overs):
        say(line)


@checkpoint_app.command()
def show(
    place: Annotated[
        str, typer.Argument(help="Checkpoint, or run folder (its newest); a path or a URL.", metavar="CHECKPOINT")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors with their shapes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint: progress, position in the data, optimizer, main options, files.

    Example: `megalite checkpoint show runs/quickstart/checkpoints/step_00000100 --tensors`
    """
    url, manifest, passed_over = newest_complete(place)
    facts = summarize_checkpoint(manifest)
    if as_json:
        names = {"tensor_shapes": manifest.tensors} if tensors else {}
        print_json({"url": url, **report.as_json(facts), **names})
        return
    age_s = age_seconds(manifest, datetime.now(UTC))
    say(*(f"passed over: {why}" for why in passed_over), *report.summary_lines(url, facts, age_s), sep="\n")
    report.files_table(facts["files"]).print()
    if tensors:
        report.tensors_table(manifest.tensors).print()


@checkpoint_app.command()
def verify(
    place: LocalPlace,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Read every byte: check the SHA-256 of each file, and that all numbers are finite."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check checkpoints: manifest, sizes, headers, and that every number of every tensor is stored exactly once.

    Prints a line per problem. Exit code 0 only if there is none, 1 if there is one.

    Example: `megalite checkpoint verify runs/quickstart --deep`
    """
    folders = [Path(listed.url) for listed in checkpoints_in(str(local_path(place)))]
    from launch.checkpoints.verification import bytes_to_read, verify_checkpoint  # with torch: after mistakes

    with advancing("reading", sum(map(bytes_to_read, folders)) if deep else 0) as advance:
        results = [verify_checkpoint(folder, deep=deep, advance=advance) for folder in folders]
    passed = all(result.passed for result in results)
    if as_json:
        print_json({"passed": passed, "deep": deep, "checkpoints": report.as_json(results)})
    else:
        say(*report.verification_lines(results, deep=deep), sep="\n")
    if not passed:
        raise typer.Exit(VERIFY_FAILED_CODE)


@checkpoint_app.command()
def diff(
    first: Annotated[str, typer.Argument(help="Checkpoint, or run folder (its newest).", metavar="A")],
    second: Annotated[str, typer.Argument(help="Checkpoint to compare with; layouts may differ.", metavar="B")],
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="Largest difference that counts as equal, relative to a tensor's largest number."),
    ] = 0.0,
    everything: Annotated[bool, typer.Option("--all", help="Show all differences, not only the largest.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by canonical name, whatever their layouts: weights, moments, progress and config.

    Exit code 0 if a run would continue from either in the same way, 1 if not. Config and layout may differ.

    Example: `megalite checkpoint diff runs/a runs/b/checkpoints/step_00000100 --tolerance 1e-6`
    """
    from launch.checkpoints.difference import difference, numbers_in_common
    from megalite.checkpoint.reader import CheckpointReader, open_checkpoint

    left, right = (open_checkpoint(local_path(place), CheckpointReader) for place in (first, second))
    with advancing("comparing", 4 * numbers_in_common(left.manifest, right.manifest)) as advance:
        found = difference(left, right, advance=lambda numbers: advance(4 * numbers))
    equal = found.is_equal(tolerance)
    if as_json:
        print_json({"equal": equal, "tolerance": tolerance, **report.as_json(found)})
    else:
        if found.different:
            report.difference_table(found, tolerance, everything=everything).print()
        say(*report.difference_lines(found, tolerance, everything=everything), sep="\n")
    if not equal:
        raise typer.Exit(VERIFY_FAILED_CODE)


@checkpoint_app.command()
def prune(
    place: Annotated[str, typer.Argument(help="Run folder, or folder of checkpoints.", metavar="DIR")],
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    keep_every: Annotated[int, typer.Option(min=0, help="Keep steps that are a multiple of this; 0: none.")] = 0,
    keep_best: Annotated[
        int, typer.Option(min=0, help="Number of checkpoints with the lowest evaluation loss to keep.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints that no option keeps, and folders of interrupted saves; never the newest complete checkpoint.

    Prints what is deleted and what is kept and why, and asks for confirmation. Refuses while a run uses the folder.

    Example: `megalite checkpoint prune runs/quickstart --keep-last 3 --keep-every 1000 --dry-run`
    """
    policy = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise LaunchError("prune asks before it deletes, and there is no terminal to ask on: add --yes, or --dry-run")
    with nullcontext() if dry_run else keep_runs_out_of(place):
        plan = plan_prune(place, policy)
        if not as_json:
            report.prune_table(plan).print()
            say(report.prune_line(plan))
        is_deleting = not dry_run and not plan.is_empty
        if is_deleting:
            if not yes:
                typer.confirm("Delete them?", abort=True, err=True)
            carry_out(plan, policy)
    if as_json:
        print_json({"deleted": is_deleting, **report.as_json(plan)})
    elif is_deleting:
        say("deleted")


@contextmanager
def advancing(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar over `total` bytes; yields a function that advances it by a number of bytes."""
    done = 0
    with progress_bar(is_bytes=True) as report_progress:

        def advance(size: int) -> None:
            nonlocal done
            done += size
            report_progress(description, done, total)

        yield advance
