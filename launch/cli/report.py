"""The command `megalite report`; launch/inspection/page implements it. No torch."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.storage.paths import decimal_size
from launch.errors import LaunchError
from launch.output import check_writable, spinner
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from megalite.checkpoint.safe_files import check_file_is_safe
from megalite.units import plural

log = get_logger(__name__)

DEPTH = 4  # of folders that are searched for runs, as by `megalite ls`


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of the run, or a folder with runs in it.", metavar="RUN_DIR")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; default: report.html in the run's folder, index.html over several runs.",
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=1, help="Step whose timeline is drawn; default: the newest kept one without an evaluation or a save."
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser of this machine.")] = False,
) -> None:
    """Write one page about a run: curves, where its steps' time went, a step on all ranks, memory, goodput, settings.

    The page is one file of some hundred kilobytes that loads nothing, also for a run that goes on. A run writes it at
    its end (`monitor.report`). Without scripts it shows the same figures, only without cursor and zoom. Over a folder
    of runs the page is their index: state, step and loss of each, their curves, and links to their reports.

    Example: `megalite report runs/quickstart --open`
    """
    from launch.inspection.listing import list_runs
    from launch.inspection.page.index_page import INDEX, write_index_page
    from launch.inspection.page.run_page import FILE, write_run_page
    from launch.inspection.run_files import check_is_run, is_run
    from launch.inspection.timelines import check_kept
    from launch.pages.skeleton import check_page_path

    runs = list_runs(run_dir, DEPTH) if run_dir.is_dir() and not is_run(run_dir) else []
    if not runs:
        check_is_run(run_dir)
    if step is not None and runs:
        raise LaunchError(
            f"--step {step} is of one run, and {run_dir} holds {plural(len(runs), 'run')}: give its folder"
        )
    if step is not None:
        check_kept(run_dir, step)
    path = output if output is not None else run_dir / (INDEX if runs else FILE)
    if output is None and not runs:
        check_writable(path)
        check_file_is_safe(path)  # others may have put something else there
    else:
        check_page_path(path)
    with spinner(f"reading {run_dir}"):
        if runs:
            write_index_page(run_dir, runs, path)
        else:
            write_run_page(run_dir, path, step)
    say(f"wrote {path} ({decimal_size(path.stat().st_size)}); it needs no network")
    if open_ and not webbrowser.open(path.resolve().as_uri()):
        log.warning(f"there is no browser on this machine: open {path} elsewhere")
