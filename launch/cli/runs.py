"""The commands `megalite status` and `megalite ls`; launch/inspection implements them.

Exit code of `status`: 0 healthy, 1 not, 2 user error. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import AsJson, check_one_format
from launch.output import print_csv, print_json, spinner
from launch.runtime.logs import get_logger
from launch.runtime.printing import say

log = get_logger(__name__)
NOT_HEALTHY_CODE = 1


def status(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_DIR")], as_json: AsJson = False
) -> None:
    """Print the state of a run: whether it lives, its step and loss, time left, last checkpoint, last events.

    Reads the run's folder alone, from any host that shares it, and disturbs nothing. Exit code 0 if the run makes
    progress, is starting, or has ended as it should; 1 if it hangs, has failed or was stopped.

    Example: `megalite status runs/quickstart`
    """
    from launch.inspection.run_files import check_is_run
    from launch.inspection.status import as_json as facts_of
    from launch.inspection.status import read_status
    from launch.inspection.status_output import SHOWN_EVENTS, status_lines

    check_is_run(run_dir)
    found = read_status(run_dir)
    if as_json:
        print_json(facts_of(found, SHOWN_EVENTS))
    else:
        say(*status_lines(found), sep="\n")
    if not found.state.is_healthy:
        raise typer.Exit(NOT_HEALTHY_CODE)


def ls(
    folder: Annotated[Path, typer.Argument(help="Folder with runs in it.", metavar="FOLDER")] = Path(),
    depth: Annotated[int, typer.Option(min=0, help="Levels of subfolders to search.")] = 4,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the runs as CSV.")] = False,
) -> None:
    """List the runs in a folder and its subfolders: state, step, loss, layout, last activity, size of the checkpoints.

    The latest active run comes first. `megalite checkpoint ls` lists the checkpoints of one run.

    Example: `megalite ls runs`
    """
    from launch.inspection.listing import list_runs, row_of
    from launch.inspection.status_output import runs_table

    check_one_format(as_json=as_json, as_csv=as_csv)
    with spinner(f"searching {folder}") as show:
        runs = list_runs(folder, depth, lambda name: show(f"reading {name}"))
    if as_json:
        print_json({"folder": str(folder), "runs": [row_of(run) for run in runs]})
    elif not runs:
        log.warning(f"there is no run in {folder}, nor in its subfolders to depth {depth}")
    elif as_csv:
        print_csv([row_of(run) for run in runs])
    else:
        runs_table(runs).print()
