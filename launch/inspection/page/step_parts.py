"""The parts of the step: over the run as a stacked area, and by pipeline stage as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

import numpy as np

from launch.inspection.page.curves import count_text
from launch.inspection.page.findings import RECENT, RunFindings
from launch.inspection.page.sections import PageSection, keys, number_table
from launch.planning.report.svg import (
    AxisScale,
    Child,
    bar,
    drawing,
    element,
    horizontal_axis,
    label,
    slug,
    vertical_axis,
)
from megalite.monitor.steps.parts import PARTS
from megalite.planner.units import percent, seconds

WIDTH = 960.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 944.0, 12.0, 232.0
MOST_BUCKETS = 64
LEAST_SHARE = 0.005  # of the run's time, below which a part is drawn with the rest
REST = "other"
STAGE_LEFT, STAGE_RIGHT, ROW = 82.0, 850.0, 26.0
LONGEST_LABEL, LETTER = 28, 7.4  # characters of a row's name, and pixels of one
MOST_STAGES = 12
COLOURS = {
    "data": "fill-10",
    "collate_to_device": "fill-10",
    "forward": "fill-5",
    "backward": "fill-0",
    "loss": "fill-9",
    "tensor_collectives": "fill-1",
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


def parts_section(found: RunFindings) -> PageSection:
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
    x, heights = _buckets(steps[recorded], drawn)
    figure = [_area(x, heights), keys([(COLOURS[name], PARTS[name]) for name in drawn])]
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


def _buckets(steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns at most MOST_BUCKETS steps, and the mean of each column around them."""
    edges = np.linspace(0, len(steps), min(len(steps), MOST_BUCKETS) + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(steps)))
    means = {name: np.add.reduceat(column, edges) / counts for name, column in columns.items()}
    return np.add.reduceat(steps, edges) / counts, means


def _area(x: np.ndarray, heights: Mapping[str, np.ndarray]) -> Element:
    if len(x) == 1:  # an area needs two
        x, heights = np.array([x[0] - 0.5, x[0] + 0.5]), {name: np.repeat(h, 2) for name, h in heights.items()}
    across = AxisScale(float(x[0]), float(x[-1]), LEFT, RIGHT)
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
    ticks = [tick for tick in across.ticks(8) if tick == int(tick)]
    return drawing(
        "parts-area",
        "Seconds of each part of a step, over the run",
        WIDTH,
        BOTTOM + 48,
        vertical_axis(up, LEFT, RIGHT, {tick: seconds(tick) if tick else "0" for tick in up.ticks(4)}, "")[1:],
        drawn,
        horizontal_axis(across, BOTTOM, BOTTOM, {tick: count_text(tick) for tick in ticks}, "step"),
    )


def stages_section(found: RunFindings) -> PageSection:
    """Draws the parts of a step of each pipeline stage, mean over its ranks."""
    every = max(1, -(-len(found.stages) // MOST_STAGES))
    stages = dict(list(found.stages.items())[::every])
    if not any(sum(parts.values()) for parts in stages.values()):
        return PageSection("stages", "Parts by pipeline stage", "No line of steps.jsonl says what stages did.")
    names = [name for name in PARTS if any(parts[name] for parts in stages.values())]
    bars = {f"stage {stage}": parts for stage, parts in stages.items()}
    figure = [
        stacked_bars("stages-bars", bars, names, "by pipeline stage"),
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


def stacked_bars(id_: str, rows: Mapping[str, Mapping[str, float]], names: Sequence[str], what: str) -> Element:
    """Draws one bar a row, from 0 on, with the seconds of its parts beside each other; `what` says what rows are."""
    longest = max(sum(parts.values()) for parts in rows.values())
    left = max(STAGE_LEFT, 14 + LETTER * min(LONGEST_LABEL, max(map(len, rows))))
    scale = AxisScale(0.0, longest, left, STAGE_RIGHT)
    bottom = 8 + ROW * len(rows)
    drawn: list[Child] = [
        horizontal_axis(
            scale, 4, bottom, {tick: seconds(tick) if tick else "0" for tick in scale.ticks(6)}, "time of a step"
        )
    ]
    for row, (title_of_row, parts) in enumerate(rows.items()):
        y, before, wall = 8 + ROW * row, 0.0, sum(parts.values())
        drawn.append(label(left - 10, y + 15, title_of_row[:LONGEST_LABEL], "legend", "end"))
        for name in names:
            if (value := parts[name]) > 0:
                x, end = scale(before), scale(before + value)
                title = f"{title_of_row}: {PARTS[name]} {seconds(value)}, {percent(value / wall)}"
                drawn.append(
                    bar(x, y, end - x, ROW - 6, title, id=f"{slug(title_of_row)}-{name}", class_=COLOURS[name])
                )
                before += value
        drawn.append(label(WIDTH, y + 15, seconds(wall), "value", "end"))
    return drawing(id_, f"Seconds of each part of a step, {what}", WIDTH, bottom + 46, drawn)
