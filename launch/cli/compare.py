"""The command `megalite compare`; launch/inspection implements it.

Exit codes: 0 done, 1 runs that have to agree do not, 2 user error. No torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import AsJson, finite_number
from launch.errors import VERIFY_FAILED_CODE, LaunchError
from launch.output import print_json, spinner
from launch.runtime.printing import say


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; all are held against the first.", metavar="RUN")],
    page: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Also write a page with the curves of all, such as compare.html."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference of two losses, relative to the larger one; default: 0.002, with bf16 or fp16 0.01."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: where their losses part, which is faster, which parts of a step and which options differ.

    Runs that learned from the same samples, from the same first weights, by the same rule have to agree, on one device
    or on many: exit code 1 if they do not. Runs that differ in more than their layout need not, which is said.

    Example: `megalite compare runs/one_device runs/eight_devices -o compare.html`
    """
    from launch.inspection import comparison_report as report
    from launch.inspection.comparison import compare as compared
    from launch.inspection.history import RunHistory
    from launch.inspection.run_files import check_is_run
    from launch.pages.skeleton import check_page_path

    if len(runs) < 2:
        raise LaunchError(f"{runs[0]} alone: give the folders of two runs or more")
    if tolerance is not None:
        finite_number("--tolerance", tolerance, zero=True)
    for run in runs:
        check_is_run(run)
    names = names_of(runs)
    if page is not None:
        check_page_path(page)
    with spinner("reading") as show:
        histories = {}
        for name, run in names.items():
            show(f"reading {name}")
            histories[name] = RunHistory.read(run)
    found = compared(histories, tolerance)
    if page is not None:
        from launch.inspection.page.comparison_page import write_comparison_page

        write_comparison_page(found, page)
        say(f"wrote {page}", file=sys.stderr)
    if as_json:
        print_json(report.as_json(found))
    else:
        for table_of in (report.runs_table, report.differences_table, report.parts_table, report.options_table):
            if (table := table_of(found)) is not None:
                table.print()
        say(*report.sentences(found), sep="\n")
    if found.fails:
        raise typer.Exit(VERIFY_FAILED_CODE)


def names_of(runs: list[Path]) -> dict[str, Path]:
    """Returns the runs by the shortest ends of their paths that tell them apart. Raises LaunchError for one twice."""
    folders = [run.resolve() for run in runs]
    if len(set(folders)) < len(folders):
        twice = next(run for run, folder in zip(runs, folders, strict=True) if folders.count(folder) > 1)
        raise LaunchError(f"{twice} is given twice: a run agrees with itself")
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return dict(zip(names, runs, strict=True))
    return dict(zip(map(str, folders), runs, strict=True))
