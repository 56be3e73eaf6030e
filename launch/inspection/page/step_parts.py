"""The parts of the step: over the run as a stacked area, and by pipeline stage as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

import numpy as np

from launch.inspection.page.page_data import RECENT, PageData
from launch.pages.curves import count_text
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.svg import (
    WIDE,
    AxisScale,
    BarRows,
    Child,
    at_both_widths,
    bar,
    drawing,
    element,
    horizontal_axis,
    slug,
    vertical_axis,
)
from megalite.monitor.steps.parts import PARTS
from megalite.units import percent, seconds

LEFT, TOP, BOTTOM = 62.0, 12.0, 232.0
MOST_BUCKETS = 64  # on a page; a phone has as many for each pixel
LEAST_SHARE = 0.005  # of the run's time, below which a part is drawn with the rest
REST = "other"
STAGE_LEFT, STAGE_VALUES, BAR_HEIGHT = 82.0, 110.0, 20.0
LONGEST_LABEL, LETTER = 28, 7.4  # characters of a row's name, and pixels of one
MOST_STAGES = 12
COLOURS = {
    "data": "fill-10",
    "collate_to_device": "fill-10",
    "forward": "fill-5",
    "backward": "fill-0",
    "loss": "fill-9",
    "tensor_collectives": "fill-1",
    "context_collectives": "fill-1",
    "expert_collectives": "fill-1",
    "pipeline_wait": "fill-wait",
    "pipeline_transfer": "fill-3",
    "gradient_sync": "fill-6",
    "optimizer": "fill-2",
    "weights_sync": "fill-11",
    "evaluation": "fill-4",
    "self_check": "fill-8",
    "checkpoint": "fill-8",
    "logging": "fill-7",
    "meeting": "fill-7",
    "other": "fill-7",
}
"""The class of each part in all figures; parts that share one stand beside each other."""


def parts_section(found: PageData) -> PageSection:
    """Draws where the steps' time went over the run, mean over ranks."""
    parts, steps = found.history.parts_s, found.history.steps
    recorded = found.history.wall_s > 0
    if not recorded.any():
        return PageSection("parts", "Parts of the step", "This run recorded no parts of its steps.")
    columns = {name: parts[name][recorded] for name in parts}
    total = {name: float(column.sum()) for name, column in columns.items()}
    wall = sum(total.values())
    small = [name for name in total if name != REST and total[name] < LEAST_SHARE * wall]
    drawn = {name: column for name, column in columns.items() if name not in small and total[name] > 0}
    if small:
        drawn[REST] = columns.get(REST, np.zeros(int(np.count_nonzero(recorded)))) + sum(
            columns[name] for name in small
        )
    figure = [
        *at_both_widths(lambda width: _area(*_buckets(steps[recorded], drawn, width), width)),
        keys([(COLOURS[name], PARTS[name]) for name in drawn]),
    ]
    rows = [
        [PARTS[name], seconds(total[name] / int(np.count_nonzero(recorded))), percent(total[name] / wall)]
        for name in sorted(total, key=lambda name: -total[name])
        if total[name] > 0
    ]
    caption = (
        "Seconds of a step, mean over ranks. A rank waits for a neighbour until that one begins to send, "
        "and from then on transfers."
    )
    if small:
        caption += " Parts below half a percent of the run are drawn with the rest."
    table = number_table(["part", "a step", "share"], rows, words=[0])
    return PageSection("parts", "Parts of the step", caption, figure, table)


def _buckets(
    steps: np.ndarray, columns: Mapping[str, np.ndarray], width: float
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns at most so many steps as a figure of that width has room for, and the mean of each column around them."""
    edges = np.linspace(0, len(steps), min(len(steps), int(MOST_BUCKETS * width / WIDE)) + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(steps)))
    means = {name: np.add.reduceat(column, edges) / counts for name, column in columns.items()}
    return np.add.reduceat(steps, edges) / counts, means


def _area(x: np.ndarray, heights: Mapping[str, np.ndarray], width: float) -> Element:
    if len(x) == 1:  # an area needs two
        x, heights = np.array([x[0] - 0.5, x[0] + 0.5]), {name: np.repeat(h, 2) for name, h in heights.items()}
    right, about = width - 16, 8 if width == WIDE else 4
    across = AxisScale(float(x[0]), float(x[-1]), LEFT, right)
    up = AxisScale(0.0, float(sum(heights.values()).max()) * 1.02, BOTTOM, TOP)  # type: ignore[union-attr]
    places = [f"{across(value):.1f}" for value in x.tolist()]
    below, drawn = np.zeros(len(x)), []
    for name, height in heights.items():
        above = below + height
        upper = [f"{a},{up(b):.1f}" for a, b in zip(places, above.tolist(), strict=True)]
        lower = [f"{a},{up(b):.1f}" for a, b in zip(places, below.tolist(), strict=True)]
        title = element("title", PARTS[name])
        drawn.append(
            element("polygon", title, id=f"area-{name}", points=" ".join(upper + lower[::-1]), class_=COLOURS[name])
        )
        below = above
    ticks = [tick for tick in across.ticks(about) if tick == int(tick)]
    return drawing(
        "parts-area",
        "Seconds of each part of a step, over the run",
        width,
        BOTTOM + 48,
        vertical_axis(up, LEFT, right, {tick: seconds(tick) if tick else "0" for tick in up.ticks(4)}, "")[1:],
        drawn,
        horizontal_axis(across, BOTTOM, BOTTOM, {tick: count_text(tick) for tick in ticks}, "step"),
    )


def stages_section(found: PageData) -> PageSection:
    """Draws the parts of a step of each pipeline stage, mean over its ranks."""
    every = max(1, -(-len(found.stages) // MOST_STAGES))
    stages = dict(list(found.stages.items())[::every])
    if not any(sum(parts.values()) for parts in stages.values()):
        return PageSection("stages", "Parts by pipeline stage", "No line of steps.jsonl says what stages did.")
    names = [name for name in PARTS if any(parts[name] for parts in stages.values())]
    bars = {f"stage {stage}": parts for stage, parts in stages.items()}
    figure = [
        *stacked_bars("stages-bars", bars, names, "by pipeline stage"),
        keys([(COLOURS[name], PARTS[name]) for name in names]),
    ]
    rows = [
        [PARTS[name], *(seconds(parts[name]) for parts in stages.values())]
        for name in sorted(names, key=lambda name: -sum(parts[name] for parts in stages.values()))
    ]
    lines = found.history.breakdowns[-RECENT:]
    first, last = lines[0].get("step"), lines[-1].get("step")
    caption = f"Seconds of a step, mean over the ranks of a stage, steps {first} to {last}."
    if len(found.stages) > len(stages):
        caption += f" Of {len(found.stages)} stages {len(stages)} are drawn, at even distances."
    table = number_table(["part", *(f"stage {stage}" for stage in stages)], rows, words=[0])
    return PageSection("stages", "Parts by pipeline stage", caption, figure, table)


def stacked_bars(id_: str, rows: Mapping[str, Mapping[str, float]], names: Sequence[str], what: str) -> list[Element]:
    """Draws one bar a row, from 0 on, with the seconds of its parts beside each other; `what` says what rows are."""
    return at_both_widths(lambda width: _stacked_bars(id_, rows, names, what, width))


def _stacked_bars(
    id_: str, rows: Mapping[str, Mapping[str, float]], names: Sequence[str], what: str, width: float
) -> Element:
    longest = max(sum(parts.values()) for parts in rows.values())
    left = max(STAGE_LEFT, 14 + LETTER * min(LONGEST_LABEL, max(map(len, rows))))
    places = BarRows(width, left, STAGE_VALUES, BAR_HEIGHT, len(rows), top=8)
    scale = AxisScale(0.0, longest, places.left, places.right)
    ticks = {tick: seconds(tick) if tick else "0" for tick in scale.ticks(6 if width == WIDE else 3)}
    drawn: list[Child] = [horizontal_axis(scale, 4, places.bottom, ticks, "time of a step")]
    for row, (title_of_row, parts) in enumerate(rows.items()):
        before, wall = 0.0, sum(parts.values())
        drawn += places.words(row, title_of_row[:LONGEST_LABEL], seconds(wall))
        for name in names:
            if (value := parts[name]) > 0:
                x, end = scale(before), scale(before + value)
                title = f"{title_of_row}: {PARTS[name]} {seconds(value)}, {percent(value / wall)}"
                id_of_box = f"{slug(title_of_row)}-{name}"
                box = bar(x, places.y(row), end - x, BAR_HEIGHT, title, id=id_of_box, class_=COLOURS[name])
                drawn.append(box)
                before += value
    return drawing(id_, f"Seconds of each part of a step, {what}", width, places.bottom + 46, drawn)
