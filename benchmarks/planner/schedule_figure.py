"""The figure of docs/design.md: every pipeline schedule, drawn from the tables that the engine runs.

    python -m benchmarks.planner.schedule_figure              # at once; writes docs/images/pipeline_schedules.svg

Four stages, eight micro-batches; a micro-batch's forward, input gradient and weight gradient take equally long on each
stage, and messages no time. All schedules are drawn at one scale.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element, indent, tostring

from launch.pages.svg import AxisScale, Child, bar, element, label, slug
from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.schedules.passes import PassKind
from megalite.schedules.simulation import PipelineTimes, ScheduledPass, Timeline, simulate_schedule
from megalite.schedules.tables import Schedule
from megalite.units import percent

FIGURE = Path(__file__).parents[2] / "docs" / "images" / "pipeline_schedules.svg"
STAGES, MICRO_BATCHES = 4, 8
TIMES = PipelineTimes([1.0] * STAGES, [2.0] * STAGES)
WIDTH, LEFT, TOP = 960.0, 58.0, 40.0
ROW, HEADING = 18.0, 34.0
PANEL = HEADING + STAGES * ROW
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2733; } .heading { font-weight: 650; } .tick { fill: #5a6773; }
.number { font-size: 9px; text-anchor: middle; } .page { fill: #ffffff; } .idle { fill: #e9edf1; }
.pass { stroke: #ffffff; stroke-width: 0.75; }
.forward-0 { fill: #a5cdf0; } .forward-1 { fill: #6aa6dc; }
.backward-0 { fill: #f3bd84; } .backward-1 { fill: #e2994a; }
.input-gradient-0 { fill: #f7dc85; } .input-gradient-1 { fill: #e5bf3f; }
.weight-gradient-0 { fill: #b5dca8; } .weight-gradient-1 { fill: #83bd70; }
"""


def figure() -> str:
    """Returns the figure as the text of an SVG file."""
    drawn = [simulate_schedule(each, TIMES, MICRO_BATCHES, FEWEST_CHUNKS[each.value]) for each in Schedule]
    height = TOP + PANEL * len(drawn) + 12
    scale = AxisScale(0.0, max(timeline.makespan_s for timeline in drawn), LEFT, WIDTH - 8)
    panels = [_panel(timeline, TOP + PANEL * index, scale) for index, timeline in enumerate(drawn)]
    description = f"One optimizer step of {STAGES} pipeline stages and {MICRO_BATCHES} micro-batches, by schedule"
    picture = element(
        "svg",
        element("title", description),
        element("style", STYLE),
        element("rect", x=0, y=0, width=WIDTH, height=height, class_="page"),
        _legend(),
        panels,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
    )
    indent(picture)
    return tostring(picture, encoding="unicode") + "\n"


def _legend() -> list[Element]:
    drawn, x = [], LEFT
    for kind in PassKind:
        for chunk in (0, 1):
            drawn.append(element("rect", x=x + 14 * chunk, y=12, width=13, height=13, class_=_class_of(kind, chunk)))
        drawn.append(label(x + 33, 23, kind.value, "tick"))
        x += 52 + 7 * len(kind.value)
    drawn.append(element("rect", x=x, y=12, width=13, height=13, class_="idle"))
    drawn.append(label(x + 19, 23, "idle; darker: a stage's second chunk", "tick"))
    return drawn


def _panel(timeline: Timeline, top: float, scale: AxisScale) -> list[Child]:
    """Draws a schedule: a heading and one row for each stage."""
    idle = percent(1 - sum(timeline.busy_s) / timeline.makespan_s / timeline.stages)
    held = ", ".join(f"{count / timeline.chunks:g}" for count in timeline.peak_in_flight)
    facts = f"{idle} idle; micro-batches in flight at most, by stage: {held}"
    rows = top + HEADING - 8
    drawn: list[Child] = [
        element("text", element("tspan", timeline.schedule.value, class_="heading"), f"  {facts}", x=LEFT, y=rows - 6)
    ]
    for stage in range(timeline.stages):
        y = rows + ROW * stage
        end = scale(timeline.makespan_s)
        drawn.append(label(LEFT - 8, y + 13, f"stage {stage}", "tick", "end"))
        drawn.append(element("rect", x=LEFT, y=y + 1, width=end - LEFT, height=ROW - 2, class_="idle"))
        drawn.append([_box(work, y, scale) for work in timeline.work if work.stage == stage])
    return drawn


def _box(work: ScheduledPass, y: float, scale: AxisScale) -> list[Element]:
    x, end = scale(work.start_s), scale(work.end_s)
    title = f"{work.kind} of micro-batch {work.micro_batch}, chunk {work.chunk}"
    return [
        bar(x, y + 1, end - x, ROW - 2, title, class_=f"pass {_class_of(work.kind, work.chunk)}"),
        label((x + end) / 2, y + 12.5, str(work.micro_batch), "number"),
    ]


def _class_of(kind: PassKind, chunk: int) -> str:
    return f"{slug(kind.value)}-{chunk}"


def main() -> None:
    FIGURE.write_text(figure(), encoding="utf-8")
    print(f"{FIGURE}: {FIGURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
