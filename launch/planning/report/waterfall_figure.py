"""The figure of a layout's predicted step time, from matrix products up to the total."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from launch.pages.svg import WIDE, AxisScale, BarRows, Child, at_both_widths, bar, drawing, horizontal_axis, line, slug
from megalite.planner.cost.step_time import StepTime
from megalite.units import percent, seconds

NAMES, VALUES, BAR_HEIGHT = 230.0, 190.0, 22.0  # pixels
USEFUL = ("matrix products", "attention")
MEMORY_BOUND = "memory-bound"  # sequence parallelism divides it, which needs tensor parallelism
MORE_MICRO_BATCHES = "more micro-batches per step (a larger global_batch_size, or fewer replicas)"
REMEDIES = {  # part of a step -> what makes it smaller
    MEMORY_BOUND: "norms and activations move more bytes than they compute: sequence_parallel divides some of them",
    "tensor collectives": "a smaller tensor_parallel_size, and one that stays inside a node, would shrink it",
    "context collectives": "a smaller context_parallel_size, or one inside a node, would shrink it",
    "expert collectives": "a smaller expert_parallel_size, or one inside a node, would shrink it",
    "launches": "a larger micro_batch_size, which gives each kernel more to do, would shrink it",
    "stage imbalance": "fewer stages, or a number of blocks that divides better among them, would shrink it",
    "pipeline bubble": f"{MORE_MICRO_BATCHES} or fewer stages would shrink it",
    "between stages": "fewer pipeline stages, or faster links between nodes, would shrink it",
    "replicas": f"{MORE_MICRO_BATCHES} would make it matter less",
    "optimizer": "a larger global_batch_size would make it matter less",
    "offloading": "recompute.mode selective or full, which keep fewer bytes to move, would shrink it",
}


def waterfall_figure(time: StepTime) -> list[Element]:
    """Draws one row per part of the step, each starting where the one above ends."""
    return at_both_widths(lambda width: _waterfall(time, width))


def _waterfall(time: StepTime, width: float) -> Element:
    parts = {name: value for name, value in time.parts.items() if value > 0}
    places = BarRows(width, NAMES, VALUES, BAR_HEIGHT, len(parts) + 1, top=16)
    scale = AxisScale(0.0, time.seconds, places.left, places.right)
    factor, unit = (1e3, "milliseconds") if time.seconds < 0.5 else (1.0, "seconds")
    ticks = {tick: f"{tick * factor:g}" for tick in scale.ticks(8 if width == WIDE else 4)}
    drawn: list[Child] = [horizontal_axis(scale, places.top - 6, places.bottom, ticks, f"{unit} per step")]
    before = 0.0
    for row, (name, value) in enumerate([*parts.items(), ("total", time.seconds)]):
        is_total = name == "total"
        if is_total:
            before = 0.0
        x, end, y = scale(before), scale(before + value), places.y(row)
        kind = "total" if is_total else "useful" if name in USEFUL else "overhead"
        share = percent(value / time.seconds)
        title = f"{name}: {seconds(value)}, {share} of the step"
        drawn += [
            places.words(row, name, seconds(value), share, strong=is_total),
            bar(x, y, max(end - x, 1.0), BAR_HEIGHT, title, id=f"waterfall-{slug(name)}", class_=f"part {kind}"),
            None if is_total else line(end, y + BAR_HEIGHT, end, places.y(row + 1) + 2, "joint"),
        ]
        before += value
    return drawing("waterfall", "Parts of the time of one optimizer step", width, places.bottom + 46, drawn)


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
