"""The page of several runs beside each other: `megalite compare RUN RUN ... -o compare.html`. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np

from launch.inspection.comparison import ComparedRun, Comparison, relative_differences
from launch.inspection.comparison_report import differences_table, options_table, parts_table, runs_table, sentences
from launch.inspection.page.run_curves import curves_section
from launch.inspection.page.step_parts import COLOURS, stacked_bars
from launch.output import Table, write_file
from launch.pages.curves import Chart, Column, Curves, Series, chart_elements, curves_table, time_unit
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.skeleton import render_page
from launch.pages.svg import element
from megalite.monitor.records.step import CURVES
from megalite.monitor.steps.parts import PARTS

SMALLEST = 1e-9  # relative difference that a logarithmic axis shows; none at all is drawn as this


def write_comparison_page(comparison: Comparison, path: Path) -> None:
    """Writes the page. Raises LaunchError where `path` cannot be written."""
    write_file(path, comparison_page(comparison))


def comparison_page(comparison: Comparison) -> str:
    """Returns the page as HTML."""
    first, *others = (run.name for run in comparison.runs)
    groups = list(_groups(comparison))
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    meaning = (
        "Differences are relative to the larger of both numbers; beyond is the first step whose losses differ by more "
        f"than the tolerance. All runs are held against {first}."
    )
    return render_page(
        f"{', '.join(others)} against {first}",
        "; ".join(f"{run.name}: {run.layout}" for run in comparison.runs if run.layout),
        _tiles(comparison),
        list(sentences(comparison)),
        [
            _table_section("runs", "Runs", runs_table(comparison), "Speeds are medians without the first steps."),
            _table_section("differences", "Largest differences", differences_table(comparison), meaning),
            curves_section(groups[0], "By step"),
            *(_short_section(curves) for curves in groups[1:]),
            _parts_section(comparison),
            _options_section(comparison),
        ],
        groups,
        origin=f"Written by megalite compare, {written}.",
    )


def _tiles(comparison: Comparison) -> dict[str, str]:
    """Returns the numbers at the top: what has been found of each run but the first."""
    tiles = {}
    for pair in comparison.pairs:
        told = "no verdict" if pair.obstacles else "agree" if pair.agrees else "differ" if pair.steps else "none"
        tiles[f"{pair.second.name}: the losses"] = told
        if pair.largest is not None:
            tiles[f"{pair.second.name}: largest difference of a loss, relative"] = f"{pair.largest.relative:.1e}"
        if pair.token_speed is not None:
            tiles[f"{pair.second.name}: tokens/s to those of {pair.first.name}"] = f"{pair.token_speed:.2f} x"
    return tiles


def _groups(comparison: Comparison) -> Iterator[Curves]:
    """Yields the curves of all runs over steps, over tokens, and over time."""
    runs = comparison.runs
    charts = [_loss_chart("step", runs, [run.history.steps for run in runs])]
    differences = [
        Series(f"{pair.second.name} to {pair.first.name}", at, np.maximum(relative, SMALLEST), place, has_band=True)
        for place, pair in enumerate(comparison.pairs, start=1)
        for at, relative in [relative_differences(pair.first.history, pair.second.history, "loss")]
    ]
    charts.append(Chart("step-difference", "Difference of the losses", "relative", differences, is_logarithmic=True))
    if any(run.history.has("evaluation_loss") for run in runs):
        charts.append(_held_out_chart(runs))
    for name, curve in CURVES.items():
        lines = [
            Series(run.name, run.history.steps, run.history.column(name), place)
            for place, run in enumerate(runs)
            if curve.is_compared and run.history.has(name)
        ]
        if lines:
            id_ = f"step-{name.replace('_', '-')}"
            charts.append(Chart(id_, curve.title, curve.unit, lines, curve.is_logarithmic))
    yield Curves("by-step", "step", charts)
    yield Curves(
        "by-tokens", "tokens", [_loss_chart("tokens", runs, [run.history.column("tokens_seen") for run in runs])]
    )
    elapsed = [run.history.elapsed_s for run in runs]
    longest_s = max((float(column[-1]) for column in elapsed if len(column)), default=0.0)
    unit, size = time_unit(longest_s)
    yield Curves("by-time", unit, [_loss_chart("time", runs, [column / size for column in elapsed])])


def _loss_chart(id_: str, runs: Sequence[ComparedRun], places: Sequence[Column]) -> Chart:
    lines = [
        Series(run.name, x[np.isfinite(x)], run.history.column("loss")[np.isfinite(x)], place)
        for place, (run, x) in enumerate(zip(runs, places, strict=True))
    ]
    return Chart(f"{id_}-loss", "Loss", "nats per token", lines)


def _held_out_chart(runs: Sequence[ComparedRun]) -> Chart:
    lines = []
    for place, run in enumerate(runs):
        held_out = run.history.column("evaluation_loss")
        known = np.isfinite(held_out)
        if known.any():
            lines.append(Series(run.name, run.history.steps[known], held_out[known], place, is_sparse=True))
    return Chart("step-held-out", "Held-out loss", "nats per token", lines)


def _short_section(curves: Curves) -> PageSection:
    figure = [element("div", chart_elements(curves), class_="charts")]
    return PageSection(curves.id, f"By {curves.axis}", "", figure, curves_table(curves))


def _parts_section(comparison: Comparison) -> PageSection:
    table = parts_table(comparison)
    if table is None:
        return PageSection("parts", "Parts of a step", "No run has recorded the parts of its steps.")
    rows = {run.name: {part: run.parts_s.get(part, 0.0) for part in PARTS} for run in comparison.runs if run.parts_s}
    names = [part for part in PARTS if any(parts[part] for parts in rows.values())]
    figure = [
        *stacked_bars("runs-bars", rows, names, "by run"),
        keys([(COLOURS[part], PARTS[part]) for part in names]),
        _table(table),
    ]
    caption = "Seconds of a step, mean over steps and ranks; in the table the most different part comes first."
    return PageSection("parts", "Parts of a step", caption, figure)


def _options_section(comparison: Comparison) -> PageSection:
    table = options_table(comparison)
    if table is None:
        return PageSection("options", "Options that differ", "No option that is known of all runs differs.")
    return _table_section("options", "Options that differ", table, "As the config has them.")


def _table_section(id_: str, title: str, table: Table, caption: str) -> PageSection:
    return PageSection(id_, title, caption, [_table(table)])


def _table(table: Table) -> Element:
    """Returns a table of the terminal as an element of the page."""
    rows = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows if row is not None]
    return number_table(table.columns, rows, words=table.text_columns)
