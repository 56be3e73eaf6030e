"""The step time of one layout, from matrix products up to the total."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from launch.planning.report.svg import AxisScale, Child, bar, drawing, horizontal_axis, label, line, slug
from megalite.planner.cost.step_time import StepTime
from megalite.planner.units import percent, seconds

WIDTH, ROW = 960, 28
LEFT, RIGHT, TOP = 230, 770, 16
USEFUL = ("matrix products", "attention")
MEMORY_BOUND = "memory-bound"  # sequence parallelism divides it, which needs tensor parallelism
MORE_MICRO_BATCHES = "more micro-batches per step (a larger global_batch_size, or fewer replicas)"
REMEDIES = {  # part of a step -> what makes it smaller
    MEMORY_BOUND: "norms and activations move more bytes than they compute: sequence_parallel divides some of them",
    "tensor collectives": "a smaller tensor_parallel_size, and one that stays inside a node, would shrink it",
    "launches": "a larger micro_batch_size, which gives each kernel more to do, would shrink it",
    "stage imbalance": "fewer stages, or a number of blocks that divides better among them, would shrink it",
    "pipeline bubble": f"{MORE_MICRO_BATCHES} or fewer stages would shrink it",
    "between stages": "fewer pipeline stages, or faster links between nodes, would shrink it",
    "replicas": f"{MORE_MICRO_BATCHES} would make it matter less",
    "optimizer": "a larger global_batch_size would make it matter less",
    "offloading": "recompute.mode selective or full, which keep fewer bytes to move, would shrink it",
}


def waterfall_figure(time: StepTime) -> Element:
    """Draws one row per part of the step, each starting where the one above ends."""
    parts = {name: value for name, value in time.parts.items() if value > 0}
    bottom = TOP + ROW * (len(parts) + 1) + 8
    scale = AxisScale(0.0, time.seconds, LEFT, RIGHT)
    factor, unit = (1e3, "milliseconds") if time.seconds < 0.5 else (1.0, "seconds")
    ticks = {tick: f"{tick * factor:g}" for tick in scale.ticks(8)}
    drawn: list[Child] = [horizontal_axis(scale, TOP - 6, bottom, ticks, f"{unit} per step")]
    before, y = 0.0, float(TOP)
    for name, value in [*parts.items(), ("total", time.seconds)]:
        is_total = name == "total"
        if is_total:
            before = 0.0
        x, end = scale(before), scale(before + value)
        kind, strong = ("total", " strong") if is_total else ("useful" if name in USEFUL else "overhead", "")
        share = percent(value / time.seconds)
        title = f"{name}: {seconds(value)}, {share} of the step"
        drawn += [
            label(LEFT - 12, y + 15, name, f"legend{strong}", "end"),
            bar(x, y, max(end - x, 1.0), ROW - 6, title, id=f"waterfall-{slug(name)}", class_=f"part {kind}"),
            label(RIGHT + 100, y + 15, seconds(value), f"value{strong}", "end"),
            label(WIDTH, y + 15, share, f"value{strong}", "end"),
            None if is_total else line(end, y + ROW - 6, end, y + ROW + 2, "joint"),
        ]
        before += value
        y += ROW
    return drawing("waterfall", "Parts of the time of one optimizer step", WIDTH, bottom + 46, drawn)


def waterfall_caption(time: StepTime, tensor_parallel_size: int) -> str:
    """Summarises the figure, with what would shrink the largest loss."""
    useful = sum(time.parts.get(name, 0.0) for name in USEFUL)
    summary = (
        f"One optimizer step takes {seconds(time.seconds)}. The blue parts, {percent(useful / time.seconds)} of it, "
        "are the mathematics itself; the orange ones are memory traffic and what many accelerators cost."
    )
    losses = {name: value for name, value in time.parts.items() if name not in USEFUL and value > 0}
    if not losses:
        return summary
    worst = max(losses, key=lambda name: losses[name])
    has_remedy = worst in REMEDIES and not (worst == MEMORY_BOUND and tensor_parallel_size == 1)
    remedy = f"; {REMEDIES[worst]}" if has_remedy else ""
    return f"{summary} The largest of them is {worst} with {seconds(losses[worst])}{remedy}."
