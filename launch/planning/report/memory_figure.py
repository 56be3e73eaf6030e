"""Memory of each pipeline stage: stacked bars against the memory of the accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from launch.pages.svg import WIDE, AxisScale, Child, at_both_widths, bar, drawing, label, line, slug, vertical_axis
from megalite.planner.cost.memory import StageMemory
from megalite.planner.workload import ParallelLayout
from megalite.units import GIB, MIB, gib, percent

HEIGHT = 380
LEFT, TOP, BOTTOM = 56, 44, 330
LEGEND_WIDTH, LEGEND_STEP = 320, 23.0  # right of the bars, or below them where the figure is narrow
WIDEST_BAR = 72.0
SMALL = 0.05  # share of the limit; bars that need less are drawn in their own scale
UPPERMOST = ("allocator", "context")  # parts that no tensor asked for
COLOURS = 12  # in style.css: .part-0 and so on


def memory_figure(stages: Sequence[StageMemory], limit_bytes: float) -> list[Element]:
    """Draws one bar per stage, and a legend with the parts of the fullest one."""
    return at_both_widths(lambda width: _bars(stages, limit_bytes, width))


def _bars(stages: Sequence[StageMemory], limit_bytes: float, width: float) -> Element:
    is_narrow = width < WIDE
    right = width - (4 if is_narrow else LEGEND_WIDTH + 40)
    given = dict.fromkeys(name for stage in stages for name in stage.parts)
    ordered = [*(name for name in given if name not in UPPERMOST), *(name for name in UPPERMOST if name in given)]
    names = [name for name in ordered if any(stage.parts.get(name, 0) > 0 for stage in stages)]
    fullest = max(stages, key=lambda stage: stage.total)
    is_limit_near = fullest.total > SMALL * limit_bytes
    highest = max(limit_bytes, fullest.total) if is_limit_near else fullest.total
    size, unit = (GIB, "GiB") if highest > GIB / 2 else (MIB, "MiB")
    scale = AxisScale(0.0, highest * 1.06, BOTTOM, TOP)
    limit_at = scale(limit_bytes)
    ticks = {tick * size: f"{tick:g}" for tick in AxisScale(0.0, highest * 1.06 / size, BOTTOM, TOP).ticks()}
    drawn: list[Child] = [vertical_axis(scale, LEFT, right, ticks, f"{unit} per accelerator")]
    slot = (right - LEFT) / max(len(stages), 2)
    bar_width = min(WIDEST_BAR, slot * 0.72)
    labelled = range(0, len(stages), -(-len(stages) // (8 if is_narrow else 16)))
    for index, stage in enumerate(stages):
        middle = LEFT + slot * (index + 0.5)
        drawn.append(_stacked(stage, names, scale, middle - bar_width / 2, bar_width, limit_bytes))
        if index in labelled:
            drawn.append(label(middle, BOTTOM + 18, str(stage.stage), "tick", "middle"))
        if slot > 36:
            top = scale(stage.total)
            y = limit_at - 6 if limit_at - 4 < top < limit_at + 22 else top - 6  # not across the line of the limit
            drawn.append(label(middle, y, f"{stage.total / size:.1f}", "value halo", "middle"))
    drawn.append(label((LEFT + right) / 2, BOTTOM + 38, "pipeline stage", "axis", "middle"))
    if is_limit_near:
        drawn.append(line(LEFT, limit_at, right, limit_at, "limit", "memory-limit"))
    limit = f"an accelerator has {gib(limit_bytes)}{'' if is_limit_near else ', far above'}"
    left, top = (2.0, HEIGHT + 20.0) if is_narrow else (right + 40.0, TOP - 16.0)
    below = top + 40 + LEGEND_STEP * len(names) if is_narrow else float(BOTTOM)
    drawn += [line(left, top, left + 26, top, "limit")]
    drawn += [label(left + 34, top + 4, limit, "legend limit-label"), _legend(fullest, names, left, width, below)]
    height = below + 30 if is_narrow else HEIGHT
    return drawing("memory", "Memory of each pipeline stage, part by part", width, height, drawn)


def _stacked(
    stage: StageMemory, names: Sequence[str], scale: AxisScale, x: float, width: float, limit_bytes: float
) -> list[Element]:
    below, drawn = 0.0, []
    when = f" ({stage.moment})" if stage.moment else ""
    for index, name in enumerate(names):
        size = stage.parts.get(name, 0.0)
        top, bottom = scale(below + size), scale(below)
        thin = " thin" if min(bottom - top, width / 4) < 3 else ""
        title = (
            f"stage {stage.stage}, {name}: {gib(size)} ({percent(size / limit_bytes)} of the limit); the stage holds "
            f"{gib(stage.total)}{when}"
        )
        id_ = f"memory-stage-{stage.stage}-{slug(name)}"
        drawn.append(bar(x, top, width, bottom - top, title, id=id_, class_=f"part part-{index % COLOURS}{thin}"))
        below += size
    return drawn


def _legend(stage: StageMemory, names: Sequence[str], x: float, right: float, bottom: float) -> list[Element]:
    """The parts in the order of the bar, with the numbers of the fullest stage."""
    y = bottom - LEGEND_STEP * len(names)
    drawn = [label(x, y - 12, f"stage {stage.stage}, the fullest", "axis")]
    for index, name in reversed(list(enumerate(names))):
        size = stage.parts.get(name, 0.0)
        drawn += [
            bar(x, y, 13, 13, name, class_=f"part part-{index % COLOURS}"),
            label(x + 21, y + 11, name, "legend"),
            label(right - 64, y + 11, gib(size), "value", "end"),
            label(right, y + 11, percent(size / (stage.total or 1)), "value", "end"),
        ]
        y += LEGEND_STEP
    total = label(right - 64, y + 15, gib(stage.total), "value strong", "end")
    return [*drawn, line(x, y - 2, right, y - 2, "rule"), label(x + 21, y + 15, "together", "legend strong"), total]


def memory_caption(stages: Sequence[StageMemory], limit_bytes: float, layout: ParallelLayout) -> str:
    """Summarises the figure, with what would save memory where little is free."""
    fullest = max(stages, key=lambda stage: stage.total)
    name, size = max(fullest.parts.items(), key=lambda item: item[1])
    left = limit_bytes - fullest.total
    when = f", in its fullest moment ({fullest.moment})" if fullest.moment else ""
    summary = (
        f"Predicted peak of one rank of each stage. Stage {fullest.stage} is the fullest with {gib(fullest.total)} of "
        f"{gib(limit_bytes)}{when}; the largest part is {name} ({gib(size)}). {gib(left)} stay free"
    )
    if left > 0.25 * limit_bytes:
        return f"{summary}: longer sequences or a larger model would fit as well."
    if name not in ("activations", "logits", "working"):
        remedy = "a higher zero_stage" if layout.zero_stage < 3 else "a larger tensor or pipeline parallel size"
    elif layout.micro_batch_size > 1:
        remedy = "a smaller micro_batch_size"
    elif layout.tensor_parallel_size > 1 and not layout.sequence_parallel:
        remedy = "sequence_parallel"
    else:
        mode = layout.recompute_by_stage[fullest.stage]
        remedy = "recomputation" if mode != "full" else "a larger tensor parallel size"
    return f"{summary}. If a run needs more than predicted, {remedy} helps most."
