"""The parts that `megalite bench` and `megalite scaling` share: options of a series, its progress, its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.output import Table, print_json, progress_bar
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from megalite.resilience.signals import exit_code_for
from megalite.units import count, plural, seconds

if TYPE_CHECKING:
    from launch.experiments.measurement import RunMeasurement
    from launch.experiments.running import SeriesResults
    from launch.experiments.series import RunSeries, SeriesRun
    from launch.trainer.start.checks import CheckedRun

log = get_logger(__name__)
NONE_WORKED_CODE = 1

Steps = Annotated[int, typer.Option(min=1, help="Steps of each run that are measured.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Steps of each run before them, which do not count.")]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each point; their spread says what a difference is worth.")]
SeriesFolder = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FOLDER", help="Folder of the runs and their comparison; default: beside run_dir."
    ),
]


def print_planned(series: RunSeries, checked: Sequence[CheckedRun], *, as_json: bool) -> None:
    """Prints the points and runs of a series, and how many of them are there already."""
    runs = list(series.runs())
    done = sum(map(series.is_done, runs))
    rows: list[dict[str, Any]] = [
        {
            "point": point.name,
            "ranks": run.layout.world_size,
            "overrides": list(point.overrides),
            "folder": str(series.folder_of(place)),
        }
        for place, (point, run) in enumerate(zip(series.points, checked, strict=True))
    ]
    if as_json:
        print_json({"folder": str(series.folder), "runs": len(runs), "done": done, "points": rows})
        return
    cells = [[row["point"], str(row["ranks"]), " ".join(row["overrides"]) or "none"] for row in rows]
    Table(("point", "ranks", "overrides"), cells, text_columns=(0, 2)).print()
    steps = plural(series.warm_up + series.steps, "step")
    say(f"dry run: {plural(len(runs), 'run')} of {steps} each in {series.folder}, of which {done} are done")


def make_runs(series: RunSeries, *, as_json: bool) -> SeriesResults:
    """Makes the runs that are missing, with a bar of their progress and a sentence about each on stderr."""
    from launch.experiments.running import run_series

    total = series.warm_up + series.steps
    all_runs = list(series.runs())
    missing = sum(not series.is_done(run) for run in all_runs)
    tell = log.debug if as_json else log.info  # which writes to standard output
    tell(f"{missing} of {plural(len(all_runs), 'run')} to make, of {plural(total, 'step')} each")

    def name_of(run: SeriesRun) -> str:
        return f"round {run.round} of {series.rounds}, {series.points[run.place].name}"

    def finished(run: SeriesRun, found: RunMeasurement | str) -> None:
        if isinstance(found, str):
            log.warning(f"{name_of(run)}: {found}")
        else:
            tell(f"{name_of(run)}: {seconds(found.step_s)} a step, {count(found.tokens_per_s)} tokens/s")

    with progress_bar() as show:
        return run_series(series, lambda run, step: show(name_of(run), step, total), finished)


def end_with_code_of(results: SeriesResults) -> None:
    """Ends the command with the exit code of its results, after they have been shown."""
    if results.stopped_by is not None:
        log.warning("stopped: the same command again goes on with the runs that are missing")
        raise typer.Exit(exit_code_for(results.stopped_by))
    if not any(results.measured.values()):
        log.error("none of the runs worked")
        raise typer.Exit(NONE_WORKED_CODE)
