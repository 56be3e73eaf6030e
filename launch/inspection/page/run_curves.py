"""The curves of one run over its steps, with marks for saves, skipped steps, restarts and slow ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launch.inspection.history import RunHistory
from launch.inspection.run_files import Facts, number
from launch.pages.curves import MARKS, Chart, Curves, Mark, Series, chart_elements, curves_table, time_unit
from launch.pages.sections import PageSection, keys
from launch.pages.svg import element
from megalite.monitor.records.step import CURVES

SMOOTHED = 50  # the smoothed loss is the mean over the run's steps divided by this
EVENT_KINDS = {"saved": "save", "started": "restart", "slow_rank": "slow"}


def curves_of(history: RunHistory) -> Curves:
    """Returns the charts of what a run has recorded."""
    steps = history.steps
    charts = [_loss(history)]
    if (by_source := _loss_by_source(history)) is not None:
        charts.append(by_source)
    for name, curve in CURVES.items():
        if history.has(name):
            line = Series(curve.title.lower(), steps, history.column(name), curve.colour, has_band=curve.has_band)
            id_ = f"chart-{name.replace('_', '-')}"
            charts.append(Chart(id_, curve.title, curve.unit, [line], curve.is_logarithmic))
    marks = sorted(_marks(history), key=lambda mark: mark.x)
    return Curves("run", "step", charts, marks, dict(_axes(history)))


def _axes(history: RunHistory) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Yields what curves can be drawn over besides steps: tokens seen, and time since the run's first step."""
    elapsed_s = history.elapsed_s
    unit, size = time_unit(float(elapsed_s[-1]) if len(elapsed_s) else 0.0)
    for name, places in (("tokens", history.column("tokens_seen")), (unit, elapsed_s / size)):
        there = np.isfinite(places)
        if np.count_nonzero(there) > 1:
            yield name, (history.steps[there], places[there])


def _loss(history: RunHistory) -> Chart:
    loss = history.column("loss")
    series = [Series("loss", history.steps, loss, 0, has_band=True)]
    width = len(loss) // SMOOTHED
    if width >= 3:
        series.append(Series(f"mean of {width:,} steps", history.steps, moving_mean(loss, width), 1))
    if history.has("evaluation_loss"):
        held_out = history.column("evaluation_loss")
        there = np.isfinite(held_out)
        series.append(Series("held out", history.steps[there], held_out[there], 3, is_sparse=True))
    return Chart("chart-loss", "Loss", "nats per token", series)


def _loss_by_source(history: RunHistory) -> Chart | None:
    series = []
    for place, (name, loss) in enumerate(history.source_losses.items()):
        there = np.isfinite(loss)  # a step without a target of the source is no gap
        series.append(Series(name, history.steps[there], loss[there], place))
    return Chart("chart-source-losses", "Training loss by source", "nats per token", series) if series else None


def _marks(history: RunHistory) -> Iterator[Mark]:
    sessions = 0
    for event in history.files.events:
        kind, step = EVENT_KINDS.get(event["event"]), number(event.get("step"))
        if kind == "restart":
            sessions += 1
            if sessions == 1:
                continue
        if kind is not None and step is not None:
            yield Mark(step, kind, _text_of(event, sessions))
    skipped = history.column("skipped") if history.has("skipped") else np.zeros(0)
    for step in history.steps[np.flatnonzero(skipped == 1)].tolist():
        yield Mark(step, "skip", "skipped by the guard")


def _text_of(event: Facts, session: int) -> str:
    if event["event"] == "saved":
        return "checkpoint saved"
    if event["event"] == "started":
        return f"session {session} started"
    return f"rank {event.get('rank')} became slow"


def curves_section(curves: Curves, title: str = "Curves", note: str = "") -> PageSection:
    """Draws curves with the key of their marks; `note` follows the caption."""
    kinds = [kind for kind in MARKS if any(mark.kind == kind for mark in curves.marks)]
    figure = [element("div", chart_elements(curves), class_="charts")]
    if kinds:
        figure.append(keys([(f"key-mark mark-{kind}", MARKS[kind]) for kind in kinds]))
    caption = (
        "Lines are means of the steps that share a point, shaded from the least to the largest of them; beside a name "
        "stands its last value. Where scripts run, the pointer reads all charts at once; drag to look closer, "
        "double-click to see all again."
    )
    return PageSection(curves.id, title, f"{caption} {note}".strip(), figure, curves_table(curves))


def moving_mean(y: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of the `width` values around each one, without those that are NaN."""
    is_known = np.isfinite(y)
    before = [np.concatenate([[0.0], np.cumsum(column)]) for column in (np.where(is_known, y, 0.0), is_known)]
    place = np.arange(len(y))
    start, end = np.maximum(place - width // 2, 0), np.minimum(place - width // 2 + width, len(y))
    sums, counts = (column[end] - column[start] for column in before)
    return np.where(is_known, sums / np.maximum(counts, 1), np.nan)
