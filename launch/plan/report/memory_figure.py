"""Memory of each pipeline stage: stacked bars against what the accelerator has."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from launch.plan.report.axes import Scale, vertical_axis
from launch.plan.report.elements import bar, drawing, extend, label, line, slug
from megalite.planner.job import Layout
from megalite.planner.memory import StageMemory
from megalite.planner.units import GIB, MIB, gib, percent

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 600, 44, 330
WIDEST_BAR = 72.0
SMALL = 0.05  # of the limit; what needs less is drawn in its own scale
UPPERMOST = ("allocator", "context")  # what no tensor asked for
COLOURS = 12  # in style.css: .part-0 and so on


def memory_figure(stages: Sequence[StageMemory], limit_bytes: float) -> Element:
    """One bar a stage; the parts of the fullest one are listed at the right."""
    names = _names(stages)
    fullest = max(stages, key=lambda stage: stage.total)
    is_limit_near = fullest.total > SMALL * limit_bytes
    highest = max(limit_bytes, fullest.total) if is_limit_near else fullest.total
    size, unit = (GIB, "GiB") if highest > GIB / 2 else (MIB, "MiB")
    scale = Scale(0.0, highest * 1.06, BOTTOM, TOP)
    svg = drawing("memory", "Memory of each pipeline stage, part by part", WIDTH, HEIGHT)
    ticks = {tick * size: f"{tick:g}" for tick in Scale(0.0, highest * 1.06 / size, BOTTOM, TOP).ticks()}
    extend(svg, *vertical_axis(scale, LEFT, RIGHT, ticks, f"{unit} per accelerator"))
    limit_at = scale(limit_bytes)
    slot = (RIGHT - LEFT) / max(len(stages), 2)
    width = min(WIDEST_BAR, slot * 0.72)
    labelled = range(0, len(stages), -(-len(stages) // 16))
    for index, stage in enumerate(stages):
        middle = LEFT + slot * (index + 0.5)
        extend(svg, *_stacked(stage, names, scale, middle - width / 2, width, limit_bytes))
        if index in labelled:
            extend(svg, label(middle, BOTTOM + 18, str(stage.stage), class_="tick", text_anchor="middle"))
        if slot > 36:
            y = _total_at(scale(stage.total), limit_at)
            extend(svg, label(middle, y, f"{stage.total / size:.1f}", class_="value halo", text_anchor="middle"))
    extend(svg, label((LEFT + RIGHT) / 2, BOTTOM + 38, "pipeline stage", class_="axis", text_anchor="middle"))
    if is_limit_near:
        extend(svg, line(LEFT, limit_at, RIGHT, limit_at, "limit", id="memory-limit"))
    where = "" if is_limit_near else ", far above"
    extend(svg, line(RIGHT + 40, TOP - 16, RIGHT + 66, TOP - 16, "limit"))
    words = f"an accelerator has {gib(limit_bytes)}{where}"
    extend(svg, label(RIGHT + 74, TOP - 12, words, class_="legend limit-label"))
    return extend(svg, *_legend(fullest, names))


def _total_at(top: float, limit_at: float) -> float:
    """Where the total of a bar that reaches to `top` is written: above the bar, and not across the limit's line."""
    return limit_at - 6 if limit_at - 4 < top < limit_at + 22 else top - 6


def _names(stages: Sequence[StageMemory]) -> list[str]:
    """Of all parts, each once, the same from below in all bars; those that are nothing everywhere left out."""
    given = dict.fromkeys(name for stage in stages for name in stage.parts)
    names = [*(name for name in given if name not in UPPERMOST), *(name for name in UPPERMOST if name in given)]
    return [name for name in names if any(stage.parts.get(name, 0) > 0 for stage in stages)]


def _stacked(
    stage: StageMemory, names: Sequence[str], scale: Scale, x: float, width: float, limit_bytes: float
) -> list[Element]:
    below, drawn = 0.0, []
    for index, name in enumerate(names):
        size = stage.parts.get(name, 0.0)
        top, bottom = scale(below + size), scale(below)
        when = f" ({stage.moment})" if stage.moment else ""
        thin = " thin" if min(bottom - top, width / 4) < 3 else ""
        says = f"stage {stage.stage}, {name}: {gib(size)} ({percent(size / limit_bytes)} of the limit)"
        drawn.append(
            bar(
                x,
                top,
                width,
                bottom - top,
                f"{says}; the stage holds {gib(stage.total)}{when}",
                id=f"memory-stage-{stage.stage}-{slug(name)}",
                class_=f"part part-{index % COLOURS}{thin}",
            )
        )
        below += size
    return drawn


def _legend(stage: StageMemory, names: Sequence[str]) -> list[Element]:
    """In the order of the bar, with the fullest stage's numbers."""
    x, step = RIGHT + 40, 23.0
    y = BOTTOM - step * len(names)
    drawn = [label(x, y - 12, f"stage {stage.stage}, the fullest", class_="axis")]
    for index, name in reversed(list(enumerate(names))):
        size = stage.parts.get(name, 0.0)
        drawn += [
            bar(x, y, 13, 13, name, class_=f"part part-{index % COLOURS}"),
            label(x + 21, y + 11, name, class_="legend"),
            label(WIDTH - 64, y + 11, gib(size), class_="value", text_anchor="end"),
            label(WIDTH, y + 11, percent(size / (stage.total or 1)), class_="value", text_anchor="end"),
        ]
        y += step
    drawn += [
        line(x, y - 2, WIDTH, y - 2, "rule"),
        label(x + 21, y + 15, "together", class_="legend strong"),
        label(WIDTH - 64, y + 15, gib(stage.total), class_="value strong", text_anchor="end"),
    ]
    return drawn


def memory_words(stages: Sequence[StageMemory], limit_bytes: float, layout: Layout) -> str:
    """What the figure shows, and what to do about it."""
    fullest = max(stages, key=lambda stage: stage.total)
    name, size = max(fullest.parts.items(), key=lambda item: item[1])
    left = limit_bytes - fullest.total
    when = f", in its fullest moment ({fullest.moment})" if fullest.moment else ""
    shows = (
        f"Predicted peak of one rank of each stage. Stage {fullest.stage} is the fullest with {gib(fullest.total)} of "
        f"{gib(limit_bytes)}{when}; the largest part is {name} ({gib(size)}). "
    )
    if left > 0.25 * limit_bytes:
        return f"{shows}{gib(left)} stay free: longer sequences or a larger model would fit as well."
    return f"{shows}{gib(left)} stay free. If a run needs more than predicted, {_remedy(name, layout)} helps most."


def _remedy(largest_part: str, layout: Layout) -> str:
    """Of what the layout does not do yet."""
    if largest_part not in ("activations", "logits", "working"):
        return "a higher zero_stage" if layout.zero_stage < 3 else "a larger tensor or pipeline parallel size"
    if layout.micro_batch_size > 1:
        return "a smaller micro_batch_size"
    if layout.tensor_parallel_size > 1 and not layout.sequence_parallel:
        return "sequence_parallel"
    return "recomputation" if layout.recompute != "full" else "a larger tensor parallel size"
