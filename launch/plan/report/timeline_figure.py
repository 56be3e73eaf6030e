"""Who is busy when: the pipeline schedule of one optimizer step.

A long schedule is drawn in three windows of the same length and scale: its start, a piece of its middle, and its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from launch.plan.report.axes import Scale
from launch.plan.report.elements import bar, drawing, element, extend, label, line, slug
from megalite.planner.schedules import Kind, Schedule, Timeline, Work
from megalite.planner.step_time import StepTime
from megalite.planner.units import percent, seconds

WIDTH, LEFT, RIGHT, TOP = 960.0, 62.0, 880.0, 34.0
GAP = 18.0  # between windows
MOST_ROWS, ROWS_OF_MANY = 16, 12  # of up to 16 stages all are drawn, of more 12
MOST_BOXES = 3200  # in all: 700 kB
MOST_BOXES_OF_ROW = 160  # 5 wide, in a schedule that is drawn whole
ROOM_FOR_DIGIT, AROUND_NUMBER = 6.4, 1.5
AFTER_THE_SCHEDULE = ("replicas", "optimizer")  # parts of the step


@dataclass(frozen=True)
class Sample:
    """What of a schedule is drawn."""

    stages: tuple[int, ...]
    windows: tuple[tuple[float, float], ...]  # from, until, in seconds


def sample_of(timeline: Timeline) -> Sample:
    """The whole schedule where it can be read and the page stays small; else pieces of it."""
    total, stages = timeline.makespan_s, _rows_of(timeline.stages)
    drawn = [work for work in timeline.work if work.stage in stages]
    if len(drawn) <= min(MOST_BOXES, MOST_BOXES_OF_ROW * len(stages)):
        return Sample(stages, ((0.0, total),))
    warmed_up = next(work.end_s for work in timeline.work if work.stage == 0 and work.kind != Kind.FORWARD)
    window = min(warmed_up * 1.1, total / 3.5)
    while sum(_overlap(work, span) for span in _windows(window, total) for work in drawn) > MOST_BOXES:
        window *= 0.8
    return Sample(stages, _windows(window, total))


def _rows_of(stages: int) -> tuple[int, ...]:
    """Which stages are drawn: all, or some at even distances, the first and the last among them."""
    if stages <= MOST_ROWS:
        return tuple(range(stages))
    return tuple(round(index * (stages - 1) / (ROWS_OF_MANY - 1)) for index in range(ROWS_OF_MANY))


def _windows(length: float, total: float) -> tuple[tuple[float, float], ...]:
    middle = (total - length) / 2
    return ((0.0, length), (middle, middle + length), (total - length, total))


def _overlap(work: Work, span: tuple[float, float]) -> bool:
    return work.end_s > span[0] and work.start_s < span[1]


def timeline_figure(timeline: Timeline) -> Element:
    """One row a stage."""
    sample = sample_of(timeline)
    row = 24.0 if len(sample.stages) <= 8 else 18.0
    bottom = TOP + row * len(sample.stages)
    svg = drawing("timeline", "Who computes what when in one optimizer step", WIDTH, bottom + 30)
    extend(svg, *_rows(timeline, sample, row))
    span = (RIGHT - LEFT - GAP * (len(sample.windows) - 1)) / len(sample.windows)
    for index, (start, end) in enumerate(sample.windows):
        left = LEFT + index * (span + GAP)
        scale = Scale(start, end, left, left + span)
        extend(svg, element("rect", x=left, y=TOP, width=span, height=bottom - TOP, class_="idle"))
        extend(svg, *_time_axis(scale, bottom))
        extend(svg, *_boxes(timeline.work, sample, scale, row))
    return extend(svg, *_legend(timeline))


def _rows(timeline: Timeline, sample: Sample, row: float) -> list[Element]:
    """Which stage, and how much of the time it computes."""
    drawn = [
        label(LEFT - 8, TOP - 10, "stage", class_="axis", text_anchor="end"),
        label(WIDTH, TOP - 10, "busy", class_="axis", text_anchor="end"),
    ]
    for index, stage in enumerate(sample.stages):
        y = TOP + row * (index + 0.5) + 4
        busy = timeline.busy_s[stage] / timeline.makespan_s
        drawn += [label(LEFT - 8, y, str(stage), class_="tick", text_anchor="end")]
        drawn += [label(WIDTH, y, percent(busy), class_="value", text_anchor="end")]
    return drawn


def _time_axis(scale: Scale, bottom: float) -> list[Element]:
    """From where until where, and a mark at round times between."""
    drawn = [
        label(scale.start, bottom + 18, seconds(scale.low) if scale.low else "0", class_="tick"),
        label(scale.end, bottom + 18, seconds(scale.high), class_="tick", text_anchor="end"),
    ]
    return drawn + [line(scale(tick), bottom, scale(tick), bottom + 5, "axis-line") for tick in scale.ticks(8)]


def _boxes(works: Sequence[Work], sample: Sample, scale: Scale, row: float) -> list[Element]:
    """Those that overlap with what `scale` shows, cut at its ends."""
    rows = {stage: index for index, stage in enumerate(sample.stages)}
    drawn = []
    for work in works:
        if work.stage not in rows or not _overlap(work, (scale.low, scale.high)):
            continue
        x, end = scale(max(work.start_s, scale.low)), scale(min(work.end_s, scale.high))
        y = TOP + row * rows[work.stage] + 1.5
        chunk = f" of chunk {work.chunk}" if work.chunk else ""
        says = f"stage {work.stage}: {work.kind} of micro-batch {work.micro_batch}{chunk}, "
        says += f"{seconds(work.start_s)} to {seconds(work.end_s)}"
        classes = f"{slug(work.kind)} chunk-{min(work.chunk, 3)}"
        drawn.append(bar(x, y, end - x, row - 3, says, id=box_id(work), class_=classes))
        number = str(work.micro_batch)
        if end - x >= ROOM_FOR_DIGIT * len(number) + AROUND_NUMBER:
            dark = " on-backward" if work.kind is not Kind.FORWARD else ""
            drawn.append(label((x + end) / 2, y + row / 2 + 2.5, number, class_=f"in-box{dark}", text_anchor="middle"))
    return drawn


def box_id(work: Work) -> str:
    return f"timeline-stage-{work.stage}-{slug(work.kind)}-{work.micro_batch}" + f"-{work.chunk}" * (work.chunk > 0)


def _legend(timeline: Timeline) -> list[Element]:
    x, drawn = LEFT, []
    for kind in (*dict.fromkeys(work.kind.value for work in timeline.work), "idle"):
        drawn += [element("rect", x=x, y=TOP - 20, width=13, height=13, class_=f"{slug(kind)} chunk-0")]
        drawn += [label(x + 19, TOP - 9, kind, class_="legend")]
        x += 44 + 7.5 * len(kind)
    return drawn


def timeline_words(timeline: Timeline, time: StepTime) -> str:
    """What the figure shows, what was left out, and what to do about the gaps."""
    sample = sample_of(timeline)
    name = "1F1B" if timeline.schedule is Schedule.ONE_F_ONE_B else timeline.schedule.value
    busy = sum(timeline.busy_s) / timeline.makespan_s / timeline.stages
    after_s = sum(time.parts.get(part, 0.0) for part in AFTER_THE_SCHEDULE)
    words = [
        f"The {name} schedule of one step, simulated from each stage's forward and backward time; numbers are "
        f"micro-batches, {timeline.micro_batches:,} in a step.",
        f"Stages compute {percent(busy)} of {seconds(timeline.makespan_s)} (the sum above counts "
        f"{seconds(time.seconds - after_s)}); then replicas agree and weights are updated, which is not drawn "
        f"({seconds(after_s)}).",
    ]
    if timeline.chunks > 1:
        words.append(f"Each stage has {timeline.chunks} chunks of the model; the paler, the later.")
    if timeline.stages > 1:
        words.append("More micro-batches per step make the waits at start and end matter less.")
    if len(sample.windows) > 1:
        words.append("Sampled: only the start, a piece of the middle and the end are drawn, at one scale.")
    if len(sample.stages) < timeline.stages:
        words.append(f"Of {timeline.stages} stages {len(sample.stages)} are drawn.")
    return " ".join(words)
