"""The timeline of one step: one row a rank, one box for each thing that it did."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from launch.inspection.page.page_data import PageData
from launch.inspection.page.step_parts import COLOURS
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.svg import WIDE, AxisScale, Child, at_both_widths, bar, drawing, element, horizontal_axis, label
from megalite.monitor.steps.message_pairs import transfers
from megalite.monitor.steps.parts import HOLDS_COLLECTIVES, OWN_WORK, PARTS, part_of
from megalite.monitor.steps.pipeline_parts import parts_by_rank
from megalite.monitor.steps.timeline import RankTimeline, TimedNote
from megalite.tracing.activity import Phase
from megalite.units import percent, plural, seconds

LEFT, NARROW_LEFT, TOP = 136.0, 62.0, 6.0  # pixels; right of the names of ranks
MOST_ROWS = 64
MOST_BOXES = 320
MOST_STRIPS = 600  # of a kind
LEAST_WIDTH = 0.3  # of a box that is drawn
ROOM_FOR_DIGIT, AROUND_NUMBER = 6.4, 4.0


def timeline_section(found: PageData) -> PageSection:
    """Draws the step on all ranks; of more than MOST_ROWS one of each stage."""
    title = "One step on all ranks"
    if found.kept is None:
        return PageSection("timeline", title, "No timeline of a step can be drawn; the list at the top says why.")
    timelines = found.kept.aligned.timelines
    shown = _rows(timelines)
    threshold = _threshold(shown)
    on_the_way = {rank: {each.end: each.start for each in of_rank} for rank, of_rank in transfers(timelines).items()}
    step = found.kept.step
    figure = at_both_widths(lambda width: _drawing(step, shown, threshold, on_the_way, width))
    parts = dict.fromkeys(part_of(span) for each in shown.values() for span in each.spans())
    if "pipeline_transfer" in parts:
        parts["pipeline_wait"] = None
    axes = {collective.axis for each in shown.values() for collective in each.collectives}
    named = {f"{axis}_collectives" for axis in axes} & set(PARTS)
    parts |= dict.fromkeys(named or ["tensor_collectives"] * bool(axes))  # in the colour of all of them
    names = [name for name in PARTS if name in parts]
    figure.append(keys([(COLOURS[name], PARTS[name]) for name in names]))
    by_rank = parts_by_rank(timelines)
    used = [name for name in PARTS if any(by_rank[rank][name] > 0 for rank in shown)]
    rows = [
        [str(rank), str(each.owner.stage), each.owner.host, *(seconds(by_rank[rank][name]) for name in used)]
        for rank, each in shown.items()
    ]
    table = number_table(["rank", "stage", "host", *(PARTS[name] for name in used)], rows, words=[2])
    caption = _caption(found.kept.step, timelines, shown, threshold)
    return PageSection("timeline", f"Step {found.kept.step:,} on all ranks", caption, figure, table)


def _rows(timelines: Mapping[int, RankTimeline]) -> dict[int, RankTimeline]:
    """Returns the timelines that are drawn, by rank: all, or the lowest rank of each stage."""
    in_order = dict(sorted(timelines.items()))
    if len(in_order) <= MOST_ROWS:
        return in_order
    first = {each.owner.stage: rank for rank, each in reversed(in_order.items())}
    return {rank: in_order[rank] for rank in sorted(first.values())[:MOST_ROWS]}


def _extent(rows: Mapping[int, RankTimeline], width: float = WIDE) -> AxisScale:
    began, ended = min(each.began for each in rows.values()), max(each.ended for each in rows.values())
    return AxisScale(began, max(ended, began + 1e-9), LEFT if width == WIDE else NARROW_LEFT, width - 10)


def _threshold(rows: Mapping[int, RankTimeline]) -> float:
    """Returns the width above which a box is drawn, so that there are at most MOST_BOXES."""
    scale = _extent(rows)
    widths = sorted(
        (scale(span.end) - scale(span.start) for each in rows.values() for span in each.spans()), reverse=True
    )
    return max(LEAST_WIDTH, widths[MOST_BOXES] if len(widths) > MOST_BOXES else 0.0)


def _drawing(
    step: int,
    rows: Mapping[int, RankTimeline],
    threshold: float,
    on_the_way: Mapping[int, Mapping[float, float]],
    width: float,
) -> Element:
    """`on_the_way` says by rank, and by the end of a box, when the message that it waited for was on its way."""
    scale, height = _extent(rows, width), 24.0 if len(rows) <= 16 else 15.0
    bottom = TOP + height * len(rows)
    length = scale.high - scale.low
    moments = AxisScale(0.0, length, scale.start, scale.end)
    ticks = {tick: seconds(tick) if tick else "0" for tick in moments.ticks(8 if width == WIDE else 3)}
    drawn: list[Child] = [horizontal_axis(moments, TOP, bottom, ticks, "since the first rank began the step")]
    for row, (rank, timeline) in enumerate(rows.items()):
        y = TOP + height * row
        place = f"stage {timeline.owner.stage} rank {rank}" if width == WIDE else f"rank {rank}"
        drawn.append(label(scale.start - 8, y + height / 2 + 4, place, "tick", "end"))
        drawn += _boxes(rank, timeline, scale, y + 1, height - 2, threshold, on_the_way[rank], MOST_STRIPS // len(rows))
    return drawing("timeline-drawing", f"Step {step} on {plural(len(rows), 'rank')}", width, bottom + 46, drawn)


def _boxes(
    rank: int,
    timeline: RankTimeline,
    scale: AxisScale,
    y: float,
    height: float,
    threshold: float,
    on_the_way: Mapping[float, float],
    most: int,
) -> list[Element]:
    """Draws a rank's row, with at most `most` strips of collectives and of transfers."""
    drawn, covered, moving = [], [], []
    for index, span in enumerate(timeline.spans()):
        x, end = scale(span.start), scale(span.end)
        if end - x <= threshold:
            continue
        part = part_of(span)
        title = f"{_name(span, part)} {seconds(span.seconds)}"
        if part == "pipeline_transfer" and span.end in on_the_way:
            began = on_the_way[span.end]
            title += f", {seconds(max(0.0, began - span.start))} of it waiting"
            part = "pipeline_wait"
            moving.append((scale(began), end))
        drawn.append(bar(x, y, end - x, height, title, id=f"box-{rank}-{index}", class_=COLOURS[part]))
        number = str(span.note.micro_batch or "")
        if number and part in OWN_WORK and end - x >= ROOM_FOR_DIGIT * len(number) + AROUND_NUMBER and height > 14:
            dark = " on-backward" if part == "backward" else ""
            drawn.append(label((x + end) / 2, y + height / 2 + 1, number, f"in-box{dark}", "middle"))
        if part in HOLDS_COLLECTIVES and span.note.phase is Phase.STEP:
            covered.append((span.start, span.end))
    paths = {
        "pipeline_transfer": _path(moving, y, height, most),
        "tensor_collectives": _path(_within(timeline, covered, scale), y + height * 0.7, height * 0.3, most),
    }
    return [*drawn, *(element("path", d=path, class_=COLOURS[part]) for part, path in paths.items() if path)]


def _name(span: TimedNote, part: str) -> str:
    note = span.note
    what = PARTS[part] if note.phase is not Phase.STEP or part == "other" else str(note.operation).replace("_", " ")
    return what + (f" of micro-batch {note.micro_batch}" if note.micro_batch else "")


def _within(timeline: RankTimeline, covered: list[tuple[float, float]], scale: AxisScale) -> list[tuple[float, float]]:
    """Returns from where to where the collectives inside computation are drawn."""
    pieces: list[tuple[float, float]] = []
    index = 0
    for each in sorted(timeline.collectives):
        while index < len(covered) and covered[index][1] <= each.began:
            index += 1
        if index == len(covered) or each.began < covered[index][0]:
            continue
        pieces.append((scale(each.began), scale(min(each.began + each.seconds, covered[index][1]))))
    return pieces


def joined(pieces: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Returns at most `most` pieces: those with the smallest gaps between them become one."""
    gap = LEAST_WIDTH
    while True:
        found: list[tuple[float, float]] = []
        for x, end in pieces:
            if found and x - found[-1][1] < gap:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((x, end))
        if len(found) <= max(1, most):
            return found
        gap *= 1.5


def _path(pieces: list[tuple[float, float]], y: float, height: float, most: int) -> str:
    """Returns the path of boxes of one height."""
    wide = [(x, end) for x, end in joined(pieces, most) if end - x > LEAST_WIDTH]
    return "".join(f"M{x:.1f} {y:.1f}h{end - x:.1f}v{height:.1f}h{x - end:.1f}z" for x, end in wide)


def _caption(
    step: int, timelines: Mapping[int, RankTimeline], shown: Mapping[int, RankTimeline], threshold: float
) -> str:
    owner = next(iter(timelines.values())).owner
    sizes = owner.sizes
    micro_batches = "1 micro-batch" if owner.micro_batches == 1 else f"{owner.micro_batches:,} micro-batches"
    schedule = f", {owner.schedule}" if owner.pipeline_parallel_size > 1 else ""
    sentences = [
        f"All that each rank did from the record of step {step - 1:,} to that of step {step:,} "
        f"({sizes}, {micro_batches}{schedule}); numbers are micro-batches, strips at the lower edge of a box are "
        "collectives inside it, close ones as one."
    ]
    if schedule:
        sentences.append("A rank in a message waits for its neighbour, and from when both are in it, for the transfer.")
    if len(shown) < len(timelines):
        sentences.append(f"Of {len(timelines):,} ranks one of each stage is drawn.")
    if threshold > LEAST_WIDTH:
        scale = _extent(shown)
        share = percent(threshold / (scale.end - scale.start))
        sentences.append(f"What took less than {share} of the step is left out; `megalite trace` shows all of it.")
    return " ".join(sentences)
