"""Goodput, the part of wall-clock time that moves training forward, against what one may choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from launch.plan.report.axes import Scale, horizontal_axis, vertical_axis
from launch.plan.report.elements import bar, drawing, element, extend, label, line, titled, written
from megalite.planner.units import percent

WIDTH, HEIGHT = 470, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 444, 42, 262


@dataclass(frozen=True)
class Point:
    """Goodput at one `x`, for the failure rate taken and for both ends of its published band."""

    x: float
    goodput: float
    with_fewest_failures: float
    with_most_failures: float


@dataclass(frozen=True)
class Marked:
    """The point of a curve that a reader looks for."""

    x: float
    goodput: float
    words: str


@dataclass(frozen=True)
class Curve:
    """Goodput as it changes with one choice."""

    points: tuple[Point, ...]  # from the smallest `x` to the largest
    marked: Marked
    axis: str  # what `x` is
    ticks: Mapping[float, str]  # round `x` -> as it is written
    write: Callable[[float], str]  # any `x`, with its unit


def goodput_figure(id_: str, curve: Curve, about: str) -> Element:
    """A line, its band, and the marked point. `x` is drawn in powers."""
    points, marked = curve.points, curve.marked
    svg = drawing(id_, about, WIDTH, HEIGHT)
    lowest = min(point.with_most_failures for point in points)
    floor = max(0.0, math.floor(lowest * 20) / 20 - 0.0001)
    across = Scale(points[0].x, points[-1].x, LEFT, RIGHT, logarithmic=True)
    up = Scale(floor * 100, 100.0, BOTTOM, TOP)
    extend(svg, *vertical_axis(up, LEFT, RIGHT, {tick: f"{tick:g}" for tick in up.ticks()}, "goodput, %"))
    extend(svg, *horizontal_axis(across, TOP, BOTTOM, curve.ticks, curve.axis))

    def at(x: float, goodput: float) -> str:
        return f"{written(across(x))},{written(up(goodput * 100))}"

    upper = [at(point.x, point.with_fewest_failures) for point in points]
    lower = [at(point.x, point.with_most_failures) for point in points]
    extend(svg, element("polygon", id=f"{id_}-band", class_="band", points=" ".join([*upper, *reversed(lower)])))
    middle = " ".join(at(point.x, point.goodput) for point in points)
    extend(svg, element("polyline", id=f"{id_}-line", class_="curve", points=middle))
    x, y = across(marked.x), up(marked.goodput * 100)
    extend(svg, line(x, BOTTOM, x, y, "joint"))
    dot = element("circle", id=f"{id_}-marked", class_="dot", cx=x, cy=y, r=4.5)
    extend(svg, titled(dot, f"{marked.words}: {percent(marked.goodput)}"))
    return extend(svg, *_marked_words(marked, x), *_targets(id_, curve, across))


def _marked_words(marked: Marked, x: float) -> list[Element]:
    """Below the curve, where there is room: above the axis."""
    anchor, shift = ("end", -8.0) if x > (LEFT + RIGHT) / 2 + 10 else ("start", 8.0)
    words = f"{marked.words}: {percent(marked.goodput)}"
    return [label(x + shift, BOTTOM - 12, words, class_="value halo", text_anchor=anchor)]


def _targets(id_: str, curve: Curve, across: Scale) -> list[Element]:
    """Columns that nobody sees, which say the numbers at a pointer."""
    drawn, points = [], curve.points
    for index, point in enumerate(points):
        start = across(points[index - 1].x) if index else LEFT
        end = across(points[index + 1].x) if index + 1 < len(points) else RIGHT
        left, right = (start + across(point.x)) / 2, (end + across(point.x)) / 2
        says = (
            f"{curve.write(point.x)}: goodput {percent(point.goodput)}, "
            f"{percent(point.with_most_failures)} to {percent(point.with_fewest_failures)} over the band"
        )
        drawn.append(bar(left, TOP, right - left, BOTTOM - TOP, says, id=f"{id_}-{index}", class_="target"))
    return drawn
