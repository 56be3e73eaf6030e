"""Curves over one axis, of one run or of several: SVG for every viewer, and numbers for uPlot where scripts run.

In: columns of any length. Out: at most `MOST_POINTS` points of each series, with mean, least and largest of what each
stands for; `chart_elements` draws them, `curves_data` holds them for charts.js.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from launch.pages.sections import keys, number_table
from launch.pages.svg import AxisScale, coordinate, drawing, element, horizontal_axis, label, vertical_axis
from megalite.units import count, short

Column = np.ndarray  # of float64
MOST_POINTS = 360  # of a series in numbers
MOST_DRAWN = 180  # of a series in SVG, where each has less than two pixels
MOST_DOTS = 60  # of a series; charts.js has the same number
MOST_MARKS = 60  # of a kind
MOST_ROWS = 20  # of the table behind the curves
WIDTH, HEIGHT = 470, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 456, 10, 172
LINES = (0, 6, 2, 4, 8, 1, 5, 7, 10, 11, 9, 3)  # colours of style.css, in the order in which lines take them
MARKS = {"save": "checkpoint saved", "skip": "step skipped", "restart": "session started", "slow": "a rank became slow"}


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    x: Column  # ascending
    y: Column  # NaN leaves a gap
    colour: int = 0  # place in LINES
    is_sparse: bool = False  # few points, which are drawn as dots too
    has_band: bool = False  # the least and largest of what a point stands for are drawn as well


@dataclass(frozen=True)
class Chart:
    """Lines over the x axis of their `Curves`."""

    id: str
    title: str
    unit: str
    series: Sequence[Series]
    is_logarithmic: bool = False


@dataclass(frozen=True)
class Mark:
    """An event on the x axis."""

    x: float
    kind: str  # of MARKS
    text: str


@dataclass(frozen=True)
class Curves:
    """Charts over one axis, which share a cursor and a zoom."""

    id: str
    axis: str  # what x counts
    charts: Sequence[Chart]
    marks: Sequence[Mark] = ()
    axes: Mapping[str, tuple[Column, Column]] = field(default_factory=dict)
    """Further axes that a reader may choose, by what they count: ascending x, and the place of each on that axis."""


def time_unit(longest_s: float) -> tuple[str, float]:
    """Returns the name and the seconds of the unit in which a time of that length is shown on an axis."""
    units = {"hours": 3600.0, "minutes": 60.0}
    return next((one for one in units.items() if longest_s >= 3 * one[1]), ("seconds", 1.0))


@dataclass(frozen=True)
class Thinned:
    """A series on the grid of its chart; NaN where it has no point."""

    mean: Column
    least: Column
    largest: Column
    is_absent: np.ndarray  # no value was asked for here: the line goes on


def grid_of(curves: Curves, most: int = MOST_POINTS) -> tuple[Column, Column]:
    """Returns the edges of at most `most` buckets over all series, and the x of each: its last one.

    Where there are no more x than that, each has a bucket of its own.
    """
    found = {id(series.x): series.x for chart in curves.charts for series in chart.series}  # most share theirs
    x = np.unique(np.concatenate([np.zeros(0), *found.values()]))
    x = x[np.isfinite(x)]
    if len(x) <= most:
        return x, x
    starts = np.linspace(x[0], x[-1], most, endpoint=False)
    places = np.unique(np.searchsorted(x, starts, "left"))  # of the first x of each bucket that has any
    return x[places], x[np.append(places[1:], len(x)) - 1]


def thin(series: Series, edges: Column) -> Thinned:
    """Returns the series in the buckets that begin at `edges`."""
    is_known = np.isfinite(series.y)
    all_places = np.searchsorted(edges, series.x, "right") - 1
    places, y = all_places[is_known], series.y[is_known]
    size = len(edges)
    counts = np.bincount(places, minlength=size)
    least, largest = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(least, places, y)
    np.maximum.at(largest, places, y)
    is_empty = counts == 0
    mean = np.bincount(places, weights=y, minlength=size) / np.maximum(counts, 1)
    for column in (mean, least, largest):
        column[is_empty] = np.nan
    is_absent = is_empty & (np.bincount(all_places, minlength=size) == 0)
    return Thinned(mean, least, largest, is_absent if not series.is_sparse else is_empty)


def curves_data(curves: Curves) -> dict[str, Any]:
    """Returns the numbers of the curves for charts.js, as JSON holds them."""
    edges, x = grid_of(curves)
    charts = []
    for chart in curves.charts:
        lines = []
        for series in chart.series:
            points = thin(series, edges)
            line = {
                "label": series.label,
                "colour": LINES[series.colour % len(LINES)],
                "dots": series.is_sparse,
                "mean": _json_numbers(points.mean, points.is_absent),
            }
            if series.has_band and len(edges) < np.isfinite(series.y).sum():
                line["least"] = _json_numbers(points.least, points.is_absent)
                line["largest"] = _json_numbers(points.largest, points.is_absent)
            lines.append(line)
        positive = _is_positive(chart)
        is_log = chart.is_logarithmic and positive
        charts.append({"id": chart.id, "unit": chart.unit, "log": is_log, "positive": positive, "lines": lines})
    marks = [{"x": mark.x, "kind": mark.kind, "text": mark.text} for mark in thin_marks(curves.marks)]
    axes = {name: _json_numbers(np.interp(x, own, places)) for name, (own, places) in curves.axes.items()}
    return {
        **{"id": curves.id, "axis": curves.axis, "x": _json_numbers(x), "axes": axes},
        **{"charts": charts, "marks": marks},
    }


def _json_numbers(values: Column, is_absent: np.ndarray | None = None) -> list[float | str | None]:
    """Returns numbers of five digits; None is a gap, an empty text is passed over."""
    numbers: list[float | str | None] = []
    for place, value in enumerate(values.tolist()):
        if math.isfinite(value):
            short = float(f"{value:.5g}") if abs(value) < 1e5 else round(value)
            numbers.append(int(short) if short == int(short) else short)
        else:
            numbers.append("" if is_absent is not None and is_absent[place] else None)
    return numbers


def thin_marks(marks: Sequence[Mark]) -> list[Mark]:
    """Returns at most MOST_MARKS marks of each kind, at even distances."""
    kept = []
    for kind in MARKS:
        own = [mark for mark in marks if mark.kind == kind]
        kept += own[:: 1 + (len(own) - 1) // MOST_MARKS] if own else []
    return kept


def _is_positive(chart: Chart) -> bool:
    """Returns whether a chart has values, and all of them have a place on a logarithmic axis."""
    values = np.concatenate([np.zeros(0), *(series.y[np.isfinite(series.y)] for series in chart.series)])
    return len(values) > 0 and bool((values > 0).all())


def chart_elements(curves: Curves) -> list[Element]:
    """Draws each chart with its title; charts.js puts uPlot in the place of the drawing."""
    return [
        element(
            "div",
            element("h3", chart.title, element("span", f", {chart.unit}", class_="unit")),
            element("div", chart_drawing(curves, chart), _legend(chart), id=chart.id, class_="chart"),
        )
        for chart in curves.charts
    ]


def _legend(chart: Chart) -> Element:
    """Names each line with its last value."""
    names = []
    for series in chart.series:
        known = series.y[np.isfinite(series.y)]
        last = f" {known[-1]:,.5g}" if len(known) else ""
        names.append((f"fill-{LINES[series.colour % len(LINES)]}", series.label + last))
    return keys(names)


def chart_drawing(curves: Curves, chart: Chart) -> Element:
    """Draws one chart as SVG."""
    edges, x = grid_of(curves, MOST_DRAWN)
    lines = [thin(series, edges) for series in chart.series]
    across = AxisScale(*_range(x), LEFT, RIGHT)
    bands = [column for line, series in zip(lines, chart.series, strict=True) for column in _extent(line, series)]
    low, high = _range(np.concatenate([np.zeros(0), *bands]), spare=0.04, least=0.0)
    is_logarithmic = chart.is_logarithmic and _is_positive(chart)
    if is_logarithmic:
        positive = np.concatenate(bands)
        low, high = float(np.nanmin(positive)) / 1.1, float(np.nanmax(positive)) * 1.1
    up = AxisScale(low, high, BOTTOM, TOP, logarithmic=is_logarithmic)
    drawn: list[Element] = [
        *vertical_axis(up, LEFT, RIGHT, {tick: count_text(tick) for tick in _ticks(up, 4)}, "")[1:],
        *horizontal_axis(across, TOP, BOTTOM, {tick: count_text(tick) for tick in across.ticks(5)}, curves.axis),
    ]
    for line, series in zip(lines, chart.series, strict=True):
        drawn += _line_elements(line, series, x, across, up)
    for kind in MARKS:
        places = [across(mark.x) for mark in thin_marks(curves.marks) if mark.kind == kind]
        ticks = "".join(f"M{x:.1f} {BOTTOM}v-9" for x in places if LEFT <= x <= RIGHT)
        if ticks:
            drawn.append(element("path", element("title", MARKS[kind]), d=ticks, class_=f"mark-{kind}"))
    if not any(np.isfinite(line.mean).any() for line in lines):
        drawn.append(label((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, "nothing on record", "axis", "middle"))
    node = drawing(f"{chart.id}-drawing", f"{chart.title} by {curves.axis}", WIDTH, HEIGHT, drawn)
    node.set("style", f"max-width:{WIDTH * 1.6:.0f}px;min-width:300px")
    return node


def _line_elements(line: Thinned, series: Series, x: Column, across: AxisScale, up: AxisScale) -> list[Element]:
    colour, drawn = LINES[series.colour % len(LINES)], []
    for run in _unbroken(line):
        places = [coordinate(round(across(value), 1)) for value in x[run].tolist()]
        heights = [coordinate(round(up(value), 1)) for value in line.mean[run].tolist()]
        if series.has_band and (line.largest[run] > line.least[run]).any():
            upper = [f"{a},{round(up(b), 1):g}" for a, b in zip(places, line.largest[run].tolist(), strict=True)]
            lower = [f"{a},{round(up(b), 1):g}" for a, b in zip(places, line.least[run].tolist(), strict=True)]
            drawn.append(element("polygon", points=" ".join(upper + lower[::-1]), class_=f"band fill-{colour}"))
        if len(run) == 1 or (series.is_sparse and len(run) <= MOST_DOTS):
            drawn += [
                element("circle", cx=a, cy=b, r=3, class_=f"fill-{colour}")
                for a, b in zip(places, heights, strict=True)
            ]
        points = " ".join(f"{a},{b}" for a, b in zip(places, heights, strict=True))
        drawn.append(element("polyline", points=points, class_=f"line stroke-{colour}"))
    return drawn


def _unbroken(line: Thinned) -> list[np.ndarray]:
    """Returns the places of the points of each piece of a line: it breaks where a value is unknown."""
    asked = np.flatnonzero(~line.is_absent)
    breaks = np.flatnonzero(~np.isfinite(line.mean[asked]))
    edges = [-1, *breaks.tolist(), len(asked)]
    return [asked[a + 1 : b] for a, b in pairwise(edges) if b - a > 1]


def _extent(line: Thinned, series: Series) -> tuple[Column, ...]:
    return (line.least, line.largest) if series.has_band else (line.mean,)


def _range(values: Column, spare: float = 0.0, least: float | None = None) -> tuple[float, float]:
    """Returns the least and largest of the values, apart from each other; `spare` is a share that is left free."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    room = (high - low) * spare
    floor = least if least is not None and low >= least else -math.inf
    return max(low - room, floor), high + room


def _ticks(scale: AxisScale, about: int) -> list[float]:
    if not scale.logarithmic or scale.high / scale.low < 20:
        return [tick for tick in scale.ticks(about) if scale.low <= tick <= scale.high]
    powers = range(math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high)) + 1)
    return [10.0**power for power in powers][:: 1 + len(powers) // 6]


def count_text(value: float) -> str:
    """Formats a number at an axis or in a table: `12,000`, `1.23 M`, `0.00012`."""
    if abs(value) >= 1000:
        return ("-" if value < 0 else "") + count(abs(value))
    return short(value) if abs(value) > 1e-12 else "0"


def curves_table(curves: Curves) -> Element:
    """Builds the table behind the curves: at most MOST_ROWS of their points, at even distances."""
    edges, x = grid_of(curves, MOST_ROWS)
    columns: dict[str, Column] = {}
    for chart in curves.charts:
        for series in chart.series:
            name = f"{chart.title}, {series.label}" if len(chart.series) > 1 else f"{chart.title}, {chart.unit}"
            columns[name] = thin(series, edges).mean
    rows = [
        [
            count_text(value),
            *(f"{column[place]:,.5g}" if math.isfinite(column[place]) else "" for column in columns.values()),
        ]
        for place, value in enumerate(x.tolist())
    ]
    return number_table([curves.axis, *columns], rows)
