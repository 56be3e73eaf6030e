"""Why the step took so long: its pipeline taken apart, and each part beside the planner's prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from launch.inspection.page.page_data import PageData
from launch.inspection.step_explanation import prediction_table, sentences
from launch.output import StyledCell
from launch.pages.sections import PageSection, keys, number_table
from launch.pages.svg import WIDE, AxisScale, BarRows, Child, at_both_widths, bar, drawing, horizontal_axis, line, slug
from megalite.monitor.steps.predicted_parts import PartPair
from megalite.units import percent, seconds

NAMES, VALUES, PAIR_VALUES = 230.0, 190.0, 280.0  # pixels that names and values take
BAR_HEIGHT, HALF_HEIGHT = 22.0, 12.0
COLOURS = {"predicted": "fill-9", "measured": "fill-0"}
USEFUL = ("work", "computing")


def waterfall_section(found: PageData) -> PageSection:
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
    figure = at_both_widths(lambda width: _waterfall(pipeline.parts_s, pipeline.span_s, width))
    table = number_table(["part", "seconds", "share of the span"], rows, words=[0])
    lines = [sentence[0].upper() + sentence[1:] + "." for sentence in list(sentences(explanation))[2:]]
    return PageSection("what-if", title, " ".join([caption, *lines]), figure, table)


def _waterfall(parts_s: Mapping[str, float], span_s: float, width: float) -> Element:
    """Draws one row a part, each beginning where the one above ends; a negative one goes back."""
    ends, total = [0.0], 0.0
    for value in parts_s.values():
        total += value
        ends.append(total)
    places = BarRows(width, NAMES, VALUES, BAR_HEIGHT, len(parts_s) + 1)
    scale = AxisScale(min(ends), max(*ends, span_s), places.left, places.right)
    drawn: list[Child] = [_time_axis(scale, places, "of the step")]
    for row, (name, value) in enumerate([*parts_s.items(), ("span", span_s)]):
        start = ends[row] if name != "span" else 0.0
        low, high = scale(min(start, start + value)), scale(max(start, start + value))
        y = places.y(row)
        kind = "total" if name == "span" else "useful" if name in USEFUL else "overhead"
        shown, share = _signed(value, span_s)
        title, id_ = f"{name}: {shown}, {share}", f"what-if-{slug(name)}"
        drawn += [
            places.words(row, name, shown, share, strong=name == "span"),
            bar(low, y, max(high - low, 1.0), BAR_HEIGHT, title, id=id_, class_=f"part {kind}"),
        ]
        if name != "span":
            joint = scale(start + value)
            drawn.append(line(joint, y + BAR_HEIGHT, joint, places.y(row + 1), "joint"))
    return drawing("what-if-drawing", "Parts of the span of a pipelined step", width, places.bottom + 46, drawn)


def _signed(value_s: float, span_s: float) -> tuple[str, str]:
    """Returns seconds and their share of the span in words; what is below a nanosecond is rounding."""
    if abs(value_s) < 1e-9:
        return "0", "0 %"
    sign = "-" if value_s < 0 else ""
    return sign + seconds(abs(value_s)), sign + percent(abs(value_s) / span_s)


def _time_axis(scale: AxisScale, places: BarRows, what: str) -> Sequence[Element]:
    about = 7 if places.width == WIDE else 3
    ticks = {tick: seconds(tick) if tick > 0 else "0" for tick in scale.ticks(about) if tick >= 0}
    return horizontal_axis(scale, places.top - 6, places.bottom, ticks, f"time {what}")


def prediction_section(found: PageData) -> PageSection:
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
    drawings = at_both_widths(lambda width: _pairs(pairs, width))
    figure = [*drawings, keys([(colour, kind) for kind, colour in COLOURS.items()])]
    return PageSection("prediction", title, caption, figure, table)


def _pairs(pairs: Sequence[PartPair], width: float) -> Element:
    longest = max(max(pair.measured_s, pair.predicted_s or 0.0) for pair in pairs)
    places = BarRows(width, NAMES, PAIR_VALUES, 2 * HALF_HEIGHT + 1, len(pairs))
    scale = AxisScale(0.0, longest or 1.0, places.left, places.right)
    drawn: list[Child] = [_time_axis(scale, places, "of the step")]
    for row, pair in enumerate(pairs):
        y, values = places.y(row), {"predicted": pair.predicted_s, "measured": pair.measured_s}
        words = {kind: f"{kind} {seconds(value)}" for kind, value in values.items() if value is not None}
        shown = [words.get("predicted", "no prediction"), words["measured"]]
        if width < WIDE:  # colours tell which is which
            shown = ["none" if value is None else seconds(value) for value in values.values()]
        drawn.append(places.words(row, pair.name, *shown))
        for place, kind in enumerate(values):
            if (value := values[kind]) is not None:
                long = max(scale(value) - places.left, 0.5)
                title, id_ = f"{pair.name}: {words[kind]}", f"{kind}-{slug(pair.name)}"
                y_of_bar = y + place * (HALF_HEIGHT + 1)
                drawn.append(bar(places.left, y_of_bar, long, HALF_HEIGHT, title, id=id_, class_=COLOURS[kind]))
    return drawing("prediction-drawing", "Parts of a step, predicted and measured", width, places.bottom + 46, drawn)
