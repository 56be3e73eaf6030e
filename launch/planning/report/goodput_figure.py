"""Goodput, the share of wall-clock time that moves training forward, against checkpoint interval and cluster size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from launch.pages.svg import AxisScale, bar, coordinate, drawing, element, horizontal_axis, label, line, vertical_axis
from megalite.planner.failure_rates import PUBLISHED_BAND
from megalite.planner.reliability.goodput_model import JobScale, Reliability, at_scale, goodput_against_interval
from megalite.units import duration, percent, plural, short

WIDTH, HEIGHT = 470, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 444, 42, 262
LARGEST_SIZE = 16_384  # accelerators, in the curve over cluster sizes; or four times those of the plan
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
INTERVAL_TICKS_S = (
    *(1.0, 5.0, 20.0, MINUTE_S, 5 * MINUTE_S, 20 * MINUTE_S),
    *(HOUR_S, 4 * HOUR_S, 12 * HOUR_S, 2 * DAY_S, 7 * DAY_S),
)


@dataclass(frozen=True)
class Curve:
    """Goodput as a function of one choice, with one point marked."""

    points: tuple[tuple[float, JobScale], ...]  # by ascending `x`
    marked: tuple[float, float, str]  # x, goodput and label
    axis: str  # title of the `x` axis
    ticks: Mapping[float, str]  # round `x` -> label
    format_x: Callable[[float], str]  # any `x`, with its unit


def interval_curve(assumed: Reliability, own: JobScale) -> Curve:
    """Goodput against the checkpoint interval; that of the run is marked."""
    points = tuple((point.interval_s, point) for point in goodput_against_interval(assumed, own.gpus))
    ticks = {tick: duration(tick) for tick in INTERVAL_TICKS_S if points[0][0] <= tick <= points[-1][0]}
    marked = (own.interval_s, own.goodput, f"every {duration(own.interval_s)}")
    return Curve(points, marked, "training between two checkpoints", ticks, lambda x: f"every {duration(x)}")


def size_curve(assumed: Reliability, gpus: int) -> Curve:
    """Goodput on other numbers of accelerators; that of the plan is marked. Each has its own interval under `auto`."""
    sizes, size = {gpus}, assumed.gpus_per_node
    while size <= max(LARGEST_SIZE, 4 * gpus):
        sizes.add(size)
        size *= 2
    points = tuple((float(count), at_scale(assumed, count)) for count in sorted(sizes))
    own = next(point for x, point in points if x == gpus)
    powers = (assumed.gpus_per_node * 4**power for power in range(20))
    ticks = {float(tick): f"{tick:,}" for tick in powers if tick <= points[-1][0]}
    marked = (float(gpus), own.goodput, plural(gpus, "accelerator"))
    return Curve(points, marked, "accelerators", ticks, lambda x: plural(round(x), "accelerator"))


def goodput_figure(id_: str, curve: Curve, description: str) -> Element:
    """Draws the curve with its band over the published failure rates, on a logarithmic `x` axis."""
    points = curve.points
    lowest = min(point.goodput_at_high_rate for _, point in points)
    floor = max(0.0, math.floor(lowest * 20) / 20 - 0.0001)
    across = AxisScale(points[0][0], points[-1][0], LEFT, RIGHT, logarithmic=True)
    up = AxisScale(floor * 100, 100.0, BOTTOM, TOP)

    def at(x: float, goodput: float) -> str:
        return f"{coordinate(across(x))},{coordinate(up(goodput * 100))}"

    upper = [at(x, point.goodput_at_low_rate) for x, point in points]
    lower = [at(x, point.goodput_at_high_rate) for x, point in points]
    middle = [at(x, point.goodput) for x, point in points]
    x, y = across(curve.marked[0]), up(curve.marked[1] * 100)
    mark = f"{curve.marked[2]}: {percent(curve.marked[1])}"
    anchor, shift = ("end", -8.0) if x > (LEFT + RIGHT) / 2 + 10 else ("start", 8.0)
    return drawing(
        id_,
        description,
        WIDTH,
        HEIGHT,
        vertical_axis(up, LEFT, RIGHT, {tick: f"{tick:g}" for tick in up.ticks()}, "goodput, %"),
        horizontal_axis(across, TOP, BOTTOM, curve.ticks, curve.axis),
        element("polygon", id=f"{id_}-band", class_="band", points=" ".join([*upper, *reversed(lower)])),
        element("polyline", id=f"{id_}-line", class_="curve", points=" ".join(middle)),
        line(x, BOTTOM, x, y, "joint"),
        element("circle", element("title", mark), id=f"{id_}-marked", class_="dot", cx=x, cy=y, r=4.5),
        label(x + shift, BOTTOM - 12, mark, "value halo", anchor),  # above the axis, where there is room
        _hover_targets(id_, curve, across),
    )


def _hover_targets(id_: str, curve: Curve, across: AxisScale) -> list[Element]:
    """Transparent columns that show the numbers of a point next to the pointer."""
    drawn, points = [], curve.points
    for index, (x, point) in enumerate(points):
        start = across(points[index - 1][0]) if index else LEFT
        end = across(points[index + 1][0]) if index + 1 < len(points) else RIGHT
        left, right = (start + across(x)) / 2, (end + across(x)) / 2
        band = f"{percent(point.goodput_at_high_rate)} to {percent(point.goodput_at_low_rate)} over the band"
        title = f"{curve.format_x(x)}: goodput {percent(point.goodput)}, {band}"
        drawn.append(bar(left, TOP, right - left, BOTTOM - TOP, title, id=f"{id_}-{index}", class_="target"))
    return drawn


def goodput_caption(scale: JobScale, assumed: Reliability, interval: str) -> str:
    """Summarises both curves, with what would shrink the largest loss; `interval`: how often the run saves."""
    losses = {part: scale.hours[part] for part in ("writes", "rework", "restarts")}
    worst = max(losses, key=lambda part: losses[part])
    remedy = {
        "writes": "more writers, or saves in the background, shrink it",
        "rework": "cheaper and therefore more frequent checkpoints shrink it",
        "restarts": "faster detection of failures and faster restarts shrink it",
    }[worst]
    low, high = PUBLISHED_BAND
    return (
        "The share of wall time that moves training forward; failures, writes and restarts take the rest. Saves come "
        f"{interval}: {percent(scale.goodput)} at {short(assumed.rate_per_1000_node_days)} failures per 1,000 "
        f"node-days, {percent(scale.goodput_at_high_rate)} to {percent(scale.goodput_at_low_rate)} over the published "
        f"band of {low:g} to {high:g}, which is shaded. The curve is flat around its best: half or twice the best "
        f"interval costs little. Of {duration(assumed.days * DAY_S)}, {duration(sum(losses.values()) * 3600)} are "
        f"lost, most of them to {worst}; {remedy}."
    )
