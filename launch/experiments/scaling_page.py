"""The page of `megalite scaling`: speed and efficiency over ranks, and which parts of the step the loss is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from launch.experiments.efficiency import PART_NAMES, WORTH_TELLING, ScaledPoint
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.skeleton import render_page
from launch.pages.svg import AxisScale, Child, bar, coordinate, drawing, element, horizontal_axis, label, vertical_axis
from megalite.units import count, percent, plural, short

WIDTH, HEIGHT = 470, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 450, 30, 246
LEAST_GAP = 26  # pixels between two numbers below an axis
ROW, BAR_LEFT, BAR_RIGHT = 34, 150, 900
IDEAL, MEASURED, PREDICTED = 7, 0, 6  # colours of style.css
LINES = (("fill-0", "measured"), ("fill-6", "predicted before the run"), ("fill-7", "ideal: each rank as fast"))
MOST_PARTS = 9  # that the figure tells apart
REST = 7  # colour of all others
PART_COLOURS = (1, 2, 4, 5, 6, 8, 9, 10, 11)


@dataclass(frozen=True)
class ScalingFigures:
    """The points that the figures show: in order of their ranks, the smallest first."""

    compared: Sequence[ScaledPoint]
    crowded: Sequence[int]  # numbers of ranks that share cores

    def speed(self) -> Element:
        """Draws tokens per second over ranks, both axes logarithmic."""
        measured = [(one.point.ranks, one.point.tokens_per_s) for one in self.compared]
        ideal = [(one.point.ranks, one.ideal_tokens_per_s) for one in self.compared]
        predicted = [
            (one.point.ranks, rate) for one in self.compared if (rate := one.point.predicted_tokens_per_s) is not None
        ]
        rates = [rate for _, rate in (*measured, *ideal, *predicted)]
        y = AxisScale(min(rates) / 1.25, max(rates) * 1.25, BOTTOM, TOP, logarithmic=True)
        ticks = {tick: count(tick) if tick >= 10 else short(tick) for tick in log_ticks(y.low, y.high)}
        lines = self._lines(y, ((ideal, IDEAL), (predicted, PREDICTED), (measured, MEASURED)), count)
        return self._chart("speed-chart", "Tokens per second over ranks", "tokens/s", y, ticks, lines)

    def efficiency(self) -> Element:
        """Draws the efficiency over ranks."""
        measured = [(one.point.ranks, one.efficiency) for one in self.compared]
        predicted = [
            (one.point.ranks, value) for one in self.compared if (value := one.predicted_efficiency) is not None
        ]
        ideal = [(one.point.ranks, 1.0) for one in self.compared]
        top = max(1.05, *(1.05 * value for _, value in (*measured, *predicted)))
        y = AxisScale(0.0, top, BOTTOM, TOP)
        ticks = {tick: f"{100 * tick:.0f} %" for tick in y.ticks()}
        lines = self._lines(y, ((ideal, IDEAL), (predicted, PREDICTED), (measured, MEASURED)), percent)
        return self._chart(
            "efficiency-chart", "Efficiency over ranks", "of the smallest point, per rank", y, ticks, lines
        )

    def _x(self) -> AxisScale:
        ranks = [one.point.ranks for one in self.compared]
        return AxisScale(min(ranks) / 1.1, max(ranks) * 1.1, LEFT, RIGHT, logarithmic=True)

    def _chart(
        self, id_: str, description: str, unit: str, y: AxisScale, ticks: dict[float, str], lines: list[Element]
    ) -> Element:
        x = self._x()
        shown: dict[float, str] = {}
        for rank in sorted({one.point.ranks for one in self.compared}):
            if not shown or x(rank) - x(list(shown)[-1]) >= LEAST_GAP:
                shown[rank] = f"{rank}*" if rank in self.crowded else f"{rank:,}"
        axes = [*vertical_axis(y, LEFT, RIGHT, ticks, unit), *horizontal_axis(x, TOP, BOTTOM, shown, "ranks")]
        return drawing(id_, description, WIDTH, HEIGHT, axes, lines)

    def _lines(
        self, y: AxisScale, lines: Sequence[tuple[list[tuple[int, float]], int]], words: Callable[[float], str]
    ) -> list[Element]:
        x, drawn = self._x(), []
        for points, colour in lines:
            places = [(x(rank), y(value)) for rank, value in points]
            path = " ".join(f"{coordinate(across)},{coordinate(down)}" for across, down in places)
            drawn.append(element("polyline", points=path, class_=f"line stroke-{colour}"))
            if colour == IDEAL:
                continue
            for (rank, value), (across, down) in zip(points, places, strict=True):
                title = element("title", f"{plural(rank, 'rank')}: {words(value)}")
                drawn.append(element("circle", title, cx=across, cy=down, r=4, class_=f"fill-{colour}"))
        return drawn

    def losses(self) -> tuple[Element, Element] | None:
        """Draws a bar per point: what is left of the ideal, then the loss by part; None if nothing was recorded.

        Also returns the key.
        """
        points = [one for one in self.compared[1:] if one.loss_by_part]
        if not points:
            return None
        most = {name: max(one.loss_by_part.get(name, 0.0) for one in self.compared) for name in PART_NAMES}
        lost = sorted((name for name in PART_NAMES if most[name] >= WORTH_TELLING), key=lambda name: -most[name])
        parts = lost[:MOST_PARTS]
        x = AxisScale(0.0, 1.0, BAR_LEFT, BAR_RIGHT)
        bottom = 10 + ROW * len(points)
        ticks = {tick: f"{100 * tick:.0f} %" for tick in x.ticks(10)}
        drawn: list[Child] = [horizontal_axis(x, 4, bottom, ticks, "of the time of all ranks")]
        for place, one in enumerate(points):
            y = 10.0 + ROW * place
            name = f"{self._name(one)}, {100 * one.efficiency:.0f} %"
            drawn.append(label(BAR_LEFT - 10, y + 15, name, "legend", "end"))
            start = 0.0
            for part, colour, words, share in _boxes(one, parts):
                if share > 0:
                    title = f"{self._name(one)}, {words}: {percent(share)}"
                    width = x(start + share) - x(start)
                    drawn.append(bar(x(start), y, width, ROW - 12, title, id=f"loss-{place}-{part}", class_=colour))
                start += share
        names = [(colour, words) for _, colour, words, _ in _boxes(points[0], parts)]
        return drawing("loss-chart", "Loss of efficiency by part of the step", 920, bottom + 46, drawn), keys(names)

    def _name(self, one: ScaledPoint) -> str:
        return f"{plural(one.point.ranks, 'rank')}{'*' * (one.point.ranks in self.crowded)}"

    def loss_table(self) -> Element:
        """Builds the table behind the bars."""
        points = [one for one in self.compared[1:] if one.loss_by_part]
        rows = [
            [words, *(f"{100 * one.loss_by_part[name]:.1f}" for one in points)]
            for name, words in PART_NAMES.items()
            if any(abs(one.loss_by_part[name]) >= 0.0005 for one in points)
        ]
        total = ["all together", *(f"{100 * (1 - one.efficiency):.1f}" for one in points)]
        return number_table(
            ["points of efficiency", *(plural(one.point.ranks, "rank") for one in points)], [*rows, total], (0,)
        )


def _boxes(one: ScaledPoint, parts: Sequence[str]) -> list[tuple[str, str, str, float]]:
    """Returns name, class, words and share of each box of a bar, which add up to 1."""
    lost = {name: max(0.0, value) for name, value in one.loss_by_part.items()}
    shown = [
        (name, f"fill-{colour}", PART_NAMES[name], lost[name])
        for name, colour in zip(parts, PART_COLOURS, strict=False)
    ]
    rest = sum(value for name, value in lost.items() if name not in parts)
    kept = 1 - sum(lost.values())
    return [
        ("kept", "fill-0", "needed at the smallest point too", kept),
        *shown,
        ("rest", f"fill-{REST}", "other parts", rest),
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times the powers of ten between two numbers above 0; the powers alone where these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def render_scaling(title: str, subtitle: str, sentences: Sequence[str], figures: ScalingFigures, table: Element) -> str:
    """Returns the page as HTML. `table` has a row per point; points that failed are only there."""
    sections = [
        PageSection(
            "points",
            "Points",
            "Speed of all ranks together; efficiency is the speed per rank over that of the smallest point.",
            [element("div", table, class_="wide")],
        )
    ]
    tiles = {}
    if figures.compared:
        last = figures.compared[-1]
        tiles = {
            f"efficiency on {plural(last.point.ranks, 'rank')}": percent(last.efficiency),
            f"tokens/s on {plural(last.point.ranks, 'rank')}": count(last.point.tokens_per_s),
            f"times as fast as {plural(figures.compared[0].point.ranks, 'rank')}": short(
                last.point.tokens_per_s / figures.compared[0].point.tokens_per_s
            ),
        }
        charts = [
            element("div", element("h3", "Speed"), figures.speed()),
            element("div", element("h3", "Efficiency"), figures.efficiency()),
        ]
        caption = "Both axes of the speed are logarithmic. Each run made its prediction before its first step."
        if rough := next((run.why_rough for one in figures.compared for run in one.point.runs if run.why_rough), ""):
            caption += f" Predictions are rough here: {rough}."
        if figures.crowded:
            caption += " * oversubscribed: more ranks than cores of this machine."
        section = PageSection(
            "speed", "Speed over ranks", caption, [keys(LINES), element("div", charts, class_="charts")]
        )
        sections.insert(0, section)
    sections.insert(1, _loss_section(figures))
    return render_page(title, subtitle, tiles, sentences, sections, origin="Written by megalite scaling.")


def _loss_section(figures: ScalingFigures) -> PageSection:
    heading = "Where the loss goes"
    drawn = figures.losses()
    if drawn is None:
        return PageSection(
            "loss", heading, "Nothing is known: it takes two points whose runs recorded the parts of their steps."
        )
    caption = (
        "Each bar is the time of all ranks at that point, per token. The first colour is what the smallest point needs "
        "too; the others are what parts of the step take in addition."
    )
    return PageSection("loss", heading, caption, [drawn[1], drawn[0]], figures.loss_table())
