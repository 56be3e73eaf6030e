"""The figure of one step's pipeline schedule, simulated from the predicted times of its stages.

A long schedule is drawn in three windows of the same length and scale: its start, part of its middle, and its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree.ElementTree import Element

from launch.pages.svg import WIDE, AxisScale, Child, at_both_widths, bar, drawing, element, label, line, slug
from megalite.planner.cost.step_time import StepTime
from megalite.planner.search import LayoutCandidate
from megalite.schedules.passes import PassKind
from megalite.schedules.simulation import PipelineTimes, ScheduledPass, Timeline, simulate_schedule
from megalite.schedules.tables import Schedule
from megalite.units import percent, seconds

LEFT, BUSY, TOP = 62.0, 80.0, 34.0
GAP = 18.0  # between windows
MOST_ROWS, ROWS_OF_MANY = 16, 12  # up to 16 stages are all drawn; of more, 12
MOST_BOXES = 3200  # in the figure: 700 kB
MOST_BOXES_OF_ROW = 160  # each 5 wide, in a schedule that is drawn whole
ROOM_FOR_DIGIT, AROUND_NUMBER = 6.4, 1.5
NAMES = {
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "interleaved 1F1B",
    Schedule.ZERO_BUBBLE: "zero-bubble",
    Schedule.ZB_V: "ZB-V",
    Schedule.DUALPIPE_V: "DualPipeV",
}
AFTER_SCHEDULE = ("replicas", "optimizer")  # parts of the step


@dataclass(frozen=True)
class TimelineExcerpt:
    """The part of a schedule that is drawn."""

    stages: tuple[int, ...]
    windows: tuple[tuple[float, float], ...]  # start and end in seconds


def timeline_of(winner: LayoutCandidate) -> Timeline:
    """Simulates the schedule of a layout with its predicted times."""
    stages, layout = winner.time.stages, winner.layout
    times = PipelineTimes(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        winner.time.between_stages_s,
        [stage.weight_gradient_s for stage in stages],
    )
    return simulate_schedule(layout.schedule, times, winner.job.micro_batches, layout.pipeline_chunks)


def sample_of(timeline: Timeline) -> TimelineExcerpt:
    """Chooses the whole schedule where that is legible and keeps the page small, else parts of it."""
    total, stages = timeline.makespan_s, tuple(range(timeline.stages))
    if timeline.stages > MOST_ROWS:  # at even distances, with the first and the last
        stages = tuple(round(index * (timeline.stages - 1) / (ROWS_OF_MANY - 1)) for index in range(ROWS_OF_MANY))
    drawn = [work for work in timeline.work if work.stage in stages]
    if len(drawn) <= min(MOST_BOXES, MOST_BOXES_OF_ROW * len(stages)):
        return TimelineExcerpt(stages, ((0.0, total),))
    warmed_up = next(work.end_s for work in timeline.work if work.stage == 0 and work.kind != PassKind.FORWARD)
    window = min(warmed_up * 1.1, total / 3.5)
    while sum(_overlap(work, span) for span in _windows(window, total) for work in drawn) > MOST_BOXES:
        window *= 0.8
    return TimelineExcerpt(stages, _windows(window, total))


def _windows(length: float, total: float) -> tuple[tuple[float, float], ...]:
    middle = (total - length) / 2
    return ((0.0, length), (middle, middle + length), (total - length, total))


def _overlap(work: ScheduledPass, span: tuple[float, float]) -> bool:
    return work.end_s > span[0] and work.start_s < span[1]


def timeline_section(winner: LayoutCandidate) -> list[Element]:
    """Builds the section of the page with the schedule; none without pipeline parallelism, where nothing waits."""
    if winner.layout.pipeline_parallel_size == 1:
        return []
    timeline = timeline_of(winner)
    caption = element("figcaption", timeline_caption(timeline, winner.time))
    return [
        element(
            "section",
            element("h2", "Pipeline timeline"),
            element("figure", _key(timeline), timeline_figure(timeline), caption),
        )
    ]


def timeline_figure(timeline: Timeline) -> list[Element]:
    """Draws one row per stage, with the share of time in which it computes; each chunk has a part of the row."""
    return at_both_widths(lambda width: _timeline(timeline, width))


def _timeline(timeline: Timeline, width: float) -> Element:
    sample, right = sample_of(timeline), width - BUSY
    windows = sample.windows if width == WIDE else sample.windows[:1]  # a phone has room for the start alone
    row = (24.0 if len(sample.stages) <= 8 else 18.0) * (1 + (timeline.chunks - 1) / 2)
    bottom = TOP + row * len(sample.stages)
    drawn: list[Child] = [
        label(LEFT - 8, TOP - 10, "stage", "axis", "end"),
        label(width, TOP - 10, "busy", "axis", "end"),
    ]
    for index, stage in enumerate(sample.stages):
        y = TOP + row * (index + 0.5) + 4
        busy = percent(timeline.busy_s[stage] / timeline.makespan_s)
        drawn += [label(LEFT - 8, y, str(stage), "tick", "end"), label(width, y, busy, "value", "end")]
    span = (right - LEFT - GAP * (len(windows) - 1)) / len(windows)
    for index, (start, end) in enumerate(windows):
        left = LEFT + index * (span + GAP)
        scale = AxisScale(start, end, left, left + span)
        drawn += [
            element("rect", x=left, y=TOP, width=span, height=bottom - TOP, class_="idle"),
            label(scale.start, bottom + 18, seconds(scale.low) if scale.low else "0", "tick"),
            label(scale.end, bottom + 18, seconds(scale.high), "tick", "end"),
            [
                line(scale(tick), bottom, scale(tick), bottom + 5, "axis-line")
                for tick in scale.ticks(8 if width == WIDE else 4)
            ],
            _boxes(timeline, sample, scale, row),
        ]
    return drawing("timeline", "The pipeline schedule of one optimizer step", width, bottom + 30, drawn)


def _key(timeline: Timeline) -> Element:
    kinds = (*dict.fromkeys(work.kind.value for work in timeline.work), "idle")
    boxes = [
        (kind, element("svg", element("rect", width=13, height=13, class_=slug(kind)), class_="key")) for kind in kinds
    ]
    return element("p", [[box, f" {kind}  "] for kind, box in boxes], class_="note")


def _boxes(timeline: Timeline, sample: TimelineExcerpt, scale: AxisScale, row: float) -> list[Element]:
    """The passes that overlap the window of `scale`, cut at its ends."""
    height = (row - 3) / timeline.chunks
    rows = {stage: index for index, stage in enumerate(sample.stages)}
    drawn = []
    for work in timeline.work:
        if work.stage not in rows or not _overlap(work, (scale.low, scale.high)):
            continue
        x, end = scale(max(work.start_s, scale.low)), scale(min(work.end_s, scale.high))
        y = TOP + row * rows[work.stage] + 1.5 + height * work.chunk
        through = f" through chunk {work.chunk}" if timeline.chunks > 1 else ""
        title = f"stage {work.stage}: {work.kind} of micro-batch {work.micro_batch}{through}, "
        title += f"{seconds(work.start_s)} to {seconds(work.end_s)}"
        drawn.append(bar(x, y, end - x, height, title, id=box_id(work), class_=slug(work.kind)))
        number = str(work.micro_batch)
        if end - x >= ROOM_FOR_DIGIT * len(number) + AROUND_NUMBER:
            dark = " on-backward" if work.kind is not PassKind.FORWARD else ""
            drawn.append(label((x + end) / 2, y + height / 2 + 4, number, f"in-box{dark}", "middle"))
    return drawn


def box_id(work: ScheduledPass) -> str:
    """The id of the box of one pass."""
    chunk = f"-chunk-{work.chunk}" if work.chunk else ""
    return f"timeline-stage-{work.stage}{chunk}-{slug(work.kind)}-{work.micro_batch}"


def timeline_caption(timeline: Timeline, time: StepTime) -> str:
    """Summarises the figure, and names the parts that are not drawn."""
    sample = sample_of(timeline)
    busy = sum(timeline.busy_s) / timeline.makespan_s / timeline.stages
    after_s = sum(time.parts.get(part, 0.0) for part in AFTER_SCHEDULE)
    sentences = [
        f"The {NAMES[timeline.schedule]} schedule of one step, simulated from each stage's forward and backward time; "
        f"numbers are micro-batches, {timeline.micro_batches:,} in a step.",
        f"Stages compute {percent(busy)} of {seconds(timeline.makespan_s)} (the sum above counts "
        f"{seconds(time.seconds - after_s)}); what replicas still have to exchange then, and the update of weights, "
        f"are not drawn ({seconds(after_s)}).",
    ]
    sentences.append("With more micro-batches per step, the idle time at start and end weighs less.")
    if timeline.chunks > 1:
        sentences.append(f"Each stage holds {timeline.chunks} chunks of the model, the first drawn on top.")
    if len(sample.windows) > 1:
        sentences.append("Sampled: only the start, a piece of the middle and the end are drawn, at one scale.")
    if len(sample.stages) < timeline.stages:
        sentences.append(f"Of {timeline.stages} stages {len(sample.stages)} are drawn.")
    return " ".join(sentences)
