"""The step time of one layout, from matrix products up to the total."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from launch.plan.report.axes import Scale, horizontal_axis
from launch.plan.report.elements import bar, drawing, extend, label, line, slug
from megalite.planner.step_time import StepTime
from megalite.planner.units import percent, seconds

WIDTH, ROW = 960, 28
LEFT, RIGHT, TOP = 230, 770, 16
USEFUL = ("matrix products", "attention")
MORE_MICRO_BATCHES = "more micro-batches per step (a larger global_batch_size, or fewer replicas)"
REMEDIES = {  # part -> what makes it smaller
    "memory-bound": "norms and activations move more bytes than they compute: sequence_parallel divides some of them",
    "tensor collectives": "a smaller tensor_parallel_size, and one that stays inside a node, would shrink it",
    "launches": "a larger micro_batch_size, which gives each kernel more to do, would shrink it",
    "stage imbalance": "fewer stages, or a number of blocks that divides better among them, would shrink it",
    "pipeline bubble": f"{MORE_MICRO_BATCHES} or fewer stages would shrink it",
    "between stages": "fewer pipeline stages, or faster links between nodes, would shrink it",
    "replicas": f"{MORE_MICRO_BATCHES} would make it matter less",
    "optimizer": "a larger global_batch_size would make it matter less",
}


def waterfall_figure(time: StepTime) -> Element:
    """One row a part, each beginning where the one above ends."""
    parts = drawn_parts(time)
    bottom = TOP + ROW * (len(parts) + 1) + 8
    scale = Scale(0.0, time.seconds, LEFT, RIGHT)
    svg = drawing("waterfall", "What the time of one optimizer step goes into", WIDTH, bottom + 46)
    in_ms = time.seconds < 0.5
    ticks = {tick: f"{tick * 1e3 if in_ms else tick:g}" for tick in scale.ticks(8)}
    extend(svg, *horizontal_axis(scale, TOP - 6, bottom, ticks, f"{'milliseconds' if in_ms else 'seconds'} per step"))
    before, y = 0.0, float(TOP)
    for name, value in parts.items():
        kind = "useful" if name in USEFUL else "overhead"
        extend(svg, *_row(name, value, time.seconds, y, scale(before), scale(before + value), kind))
        before += value
        extend(svg, line(scale(before), y + ROW - 6, scale(before), y + ROW + 2, "joint"))
        y += ROW
    return extend(svg, *_row("total", time.seconds, time.seconds, y, scale(0.0), scale(time.seconds), "total"))


def drawn_parts(time: StepTime) -> Mapping[str, float]:
    """Those that take time, in order."""
    return {name: value for name, value in time.parts.items() if value > 0}


def _row(name: str, value: float, total: float, y: float, x: float, end: float, kind: str) -> list[Element]:
    says = f"{name}: {seconds(value)}, {percent(value / total)} of the step"
    strong = " strong" if kind == "total" else ""
    return [
        label(LEFT - 12, y + 15, name, class_=f"legend{strong}", text_anchor="end"),
        bar(x, y, max(end - x, 1.0), ROW - 6, says, id=f"waterfall-{slug(name)}", class_=f"part {kind}"),
        label(RIGHT + 100, y + 15, seconds(value), class_=f"value{strong}", text_anchor="end"),
        label(WIDTH, y + 15, percent(value / total), class_=f"value{strong}", text_anchor="end"),
    ]


def waterfall_words(time: StepTime) -> str:
    """What the figure shows, and what to do about it."""
    parts = drawn_parts(time)
    useful = sum(parts.get(name, 0.0) for name in USEFUL)
    shows = (
        f"One optimizer step takes {seconds(time.seconds)}. The blue parts, {percent(useful / time.seconds)} of it, "
        "are the mathematics itself; the orange ones are memory traffic and what many accelerators cost. "
    )
    losses = {name: value for name, value in parts.items() if name not in USEFUL}
    if not losses:
        return shows.strip()
    worst = max(losses, key=lambda name: losses[name])
    remedy = f"; {REMEDIES[worst]}" if worst in REMEDIES else ""
    return f"{shows}The largest of them is {worst} with {seconds(losses[worst])}{remedy}."
