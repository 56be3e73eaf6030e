"""Why the step took so long: its pipeline taken apart, and each part beside the planner's prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from launch.inspection.page.findings import RunFindings
from launch.inspection.page.sections import PageSection, keys, number_table
from launch.inspection.why import prediction_table, sentences
from launch.output import StyledCell
from launch.planning.report.svg import AxisScale, Child, bar, drawing, horizontal_axis, label, line, slug
from megalite.monitor.steps.predicted_parts import PartPair
from megalite.planner.units import percent, seconds

WIDTH, ROW, PAIR = 960.0, 28.0, 34.0
LEFT, RIGHT, TOP = 230.0, 770.0, 10.0
USEFUL = ("work", "computing")


def waterfall_section(found: RunFindings) -> PageSection:
    """Draws the parts of a pipelined step that add up to its span."""
    title, explanation = "What made the step as long as it was", found.explanation
    if explanation is None:
        return PageSection("what-if", title, "This needs the timeline of a step; the list at the top says why not.")
    pipeline = explanation.pipeline
    if pipeline is None:
        caption = "The model is not cut into stages, so there is no pipeline to take apart: the parts above are all."
        if explanation.owner.pipeline_parallel_size > 1:
            caption = "The pipeline of this step cannot be taken apart; the list at the top says why."
        return PageSection("what-if", title, caption)
    caption = (
        f"Step {pipeline.step:,}, from the first pass of a micro-batch on any rank to the end of the last one, beside "
        "a simulation with the measured medians of all stages: work is that of a mean stage, the bubble is the "
        "schedule's own if all stages were equal. Jitter is what is left, and is negative where ranks were faster than "
        "their medians."
    )
    rows = [[name, *_signed(value, pipeline.span_s)] for name, value in pipeline.parts_s.items()]
    figure = [_waterfall(pipeline.parts_s, pipeline.span_s)]
    table = number_table(["part", "seconds", "share of the span"], rows, words=[0])
    lines = [sentence[0].upper() + sentence[1:] + "." for sentence in list(sentences(explanation))[2:]]
    return PageSection("what-if", title, " ".join([caption, *lines]), figure, table)


def _waterfall(parts_s: Mapping[str, float], span_s: float) -> Element:
    """Draws one row a part, each beginning where the one above ends; a negative one goes back."""
    ends, total = [0.0], 0.0
    for value in parts_s.values():
        total += value
        ends.append(total)
    scale = AxisScale(min(ends), max(*ends, span_s), LEFT, RIGHT)
    bottom = TOP + ROW * (len(parts_s) + 1) + 4
    drawn: list[Child] = [_time_axis(scale, bottom, "of the step")]
    for row, (name, value) in enumerate([*parts_s.items(), ("span", span_s)]):
        start = ends[row] if name != "span" else 0.0
        low, high = scale(min(start, start + value)), scale(max(start, start + value))
        y = TOP + ROW * row
        kind = "total" if name == "span" else "useful" if name in USEFUL else "overhead"
        strong = " strong" if name == "span" else ""
        shown, share = _signed(value, span_s)
        drawn += [
            label(LEFT - 12, y + 15, name, f"legend{strong}", "end"),
            bar(
                low,
                y,
                max(high - low, 1.0),
                ROW - 6,
                f"{name}: {shown}, {share}",
                id=f"what-if-{slug(name)}",
                class_=f"part {kind}",
            ),
            label(RIGHT + 100, y + 15, shown, f"value{strong}", "end"),
            label(WIDTH, y + 15, share, f"value{strong}", "end"),
        ]
        if name != "span":
            joint = scale(start + value)
            drawn.append(line(joint, y + ROW - 6, joint, y + ROW, "joint"))
    return drawing("what-if-drawing", "Parts of the span of a pipelined step", WIDTH, bottom + 46, drawn)


def _signed(value_s: float, span_s: float) -> tuple[str, str]:
    """Returns seconds and their share of the span in words; what is below a nanosecond is rounding."""
    if abs(value_s) < 1e-9:
        return "0", "0 %"
    sign = "-" if value_s < 0 else ""
    return sign + seconds(abs(value_s)), sign + percent(abs(value_s) / span_s)


def _time_axis(scale: AxisScale, bottom: float, what: str) -> Sequence[Element]:
    ticks = {tick: seconds(tick) if tick > 0 else "0" for tick in scale.ticks(7) if tick >= 0}
    return horizontal_axis(scale, TOP - 6, bottom, ticks, f"time {what}")


def prediction_section(found: RunFindings) -> PageSection:
    """Draws each predicted part of the step beside the measured one."""
    title, explanation = "Predicted beside measured", found.explanation
    if explanation is None:
        return PageSection("prediction", title, "This needs the timeline of a step; the list at the top says why not.")
    pairs = explanation.beside_prediction
    shown = prediction_table(explanation)
    rows = [[cell.text if isinstance(cell, StyledCell) else cell for cell in row] for row in shown.rows if row]
    table = number_table(shown.columns, rows, words=[0])
    if not explanation.predicted_s:
        return PageSection("prediction", title, "There is no prediction of this step's parts.", table=table)
    caption = (
        f"Step {explanation.step:,}, mean over ranks. What the planner takes to need no time has no predicted bar. "
        "`megalite plan calibrate` fits the planner to a machine."
    )
    figure = [_pairs(pairs), keys([("fill-9", "predicted"), ("fill-0", "measured")])]
    return PageSection("prediction", title, caption, figure, table)


def _pairs(pairs: Sequence[PartPair]) -> Element:
    longest = max(max(pair.measured_s, pair.predicted_s or 0.0) for pair in pairs)
    scale = AxisScale(0.0, longest or 1.0, LEFT, RIGHT)
    bottom = TOP + PAIR * len(pairs) + 2
    drawn: list[Child] = [_time_axis(scale, bottom, "of the step")]
    for row, pair in enumerate(pairs):
        y = TOP + PAIR * row
        drawn.append(label(LEFT - 12, y + 18, pair.name, "legend", "end"))
        predicted = "no prediction"
        if pair.predicted_s is not None:
            predicted = f"predicted {seconds(pair.predicted_s)}"
            width = max(scale(pair.predicted_s) - LEFT, 0.5)
            drawn.append(
                bar(LEFT, y, width, 12, f"{pair.name}: {predicted}", id=f"predicted-{slug(pair.name)}", class_="fill-9")
            )
        measured = f"measured {seconds(pair.measured_s)}"
        width = max(scale(pair.measured_s) - LEFT, 0.5)
        drawn += [
            bar(LEFT, y + 13, width, 12, f"{pair.name}: {measured}", id=f"measured-{slug(pair.name)}", class_="fill-0"),
            label(WIDTH, y + 11, predicted, "tick", "end"),
            label(WIDTH, y + 25, measured, "tick", "end"),
        ]
    return drawing("prediction-drawing", "Parts of a step, predicted and measured", WIDTH, bottom + 46, drawn)
