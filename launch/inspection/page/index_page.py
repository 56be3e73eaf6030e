"""The page of `megalite report FOLDER`: a row for each run, with a link to its report, and their losses. No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote
from xml.etree.ElementTree import Element

import numpy as np

from launch.inspection.history import RunHistory
from launch.inspection.listing import RunSummary
from launch.inspection.page.run_curves import curves_section
from launch.inspection.page.run_page import FILE, title_of
from launch.inspection.status_output import runs_table
from launch.output import write_file
from launch.pages.curves import Chart, Curves, Series
from launch.pages.sections import PageSection, number_table
from launch.pages.skeleton import render_page
from launch.pages.svg import element
from megalite.checkpoint.manifest import printable
from megalite.units import plural

INDEX = "index.html"
MOST_CURVES = 12  # the latest active runs, whose lines can be told apart


def write_index_page(folder: Path, runs: Sequence[RunSummary], path: Path) -> None:
    """Writes the page over `runs`, the latest active first. Raises LaunchError where `path` cannot be written."""
    curves = Curves("losses", "step", list(_charts(runs)))
    states = Counter(str(run.status.state) for run in runs)
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    note = f"Of {len(runs):,} runs the {MOST_CURVES} latest active ones are drawn." if len(runs) > MOST_CURVES else ""
    page = render_page(
        f"Runs of {title_of(folder)}",
        ", ".join(f"{plural(number, 'run')} {state}" for state, number in states.most_common()),
        {},
        [],
        [
            _runs_section(runs, path.resolve().parent),
            *([curves_section(curves, "Losses", note)] if curves.charts else []),
        ],
        [curves],
        origin=f"megalite report {folder}, {written}",
    )
    write_file(path, page)


def _runs_section(runs: Sequence[RunSummary], beside: Path) -> PageSection:
    """Tabulates the runs as `megalite ls` does; a run that has a report is a link to it from a page in `beside`."""
    table = runs_table(runs)
    rows: list[list[str | Element]] = []
    for run, row in zip(runs, table.rows, strict=True):
        _, *cells = [cell if isinstance(cell, str) else cell.text for cell in row or ()]
        report = run.status.run_dir / FILE
        name: str | Element = run.name
        if report.is_file():
            target = report.resolve()
            is_below = target.is_relative_to(beside)
            address = quote(str(target.relative_to(beside))) if is_below else target.as_uri()
            name = element("a", printable(run.name), href=address)
        rows.append([name, *cells])
    caption = (
        "A run whose end has written `report.html` is a link to it; `megalite report RUN_DIR` writes that of any run."
    )
    shown = element("div", number_table(table.columns, rows, words=table.text_columns), class_="wide")
    return PageSection("runs", "Runs", caption, [shown])


def _charts(runs: Sequence[RunSummary]) -> Iterator[Chart]:
    """Yields the charts of the losses, of those that can be read among the latest runs."""
    losses, held_out = [], []
    for place, run in enumerate(runs[:MOST_CURVES]):
        try:
            history = RunHistory.read(run.status.run_dir)
        except OSError:
            continue  # its row says so
        name = printable(run.name)
        losses.append(Series(name, history.steps, history.column("loss"), place))
        if history.has("evaluation_loss"):
            there = np.isfinite(history.column("evaluation_loss"))
            losses_there = history.column("evaluation_loss")[there]
            held_out.append(Series(name, history.steps[there], losses_there, place, is_sparse=True))
    if any(np.isfinite(series.y).any() for series in losses):
        yield Chart("chart-losses", "Loss", "nats per token", losses)
    if held_out:
        yield Chart("chart-held-out", "Held-out loss", "nats per token", held_out)
