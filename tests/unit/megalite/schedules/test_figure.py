"""The figure of the schedules in docs/design.md is that of the tables which the engine runs."""

from __future__ import annotations

from xml.etree.ElementTree import parse

import pytest

from benchmarks.planner.schedule_figure import FIGURE, LEFT, MICRO_BATCHES, STAGES, figure
from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.schedules.passes import PassKind
from megalite.schedules.program import Compute, training_programs
from megalite.schedules.simulation import bubble_closed_form
from megalite.schedules.tables import Schedule, placement

SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_figure_is_that_of_the_tables() -> None:
    assert FIGURE.read_text(encoding="utf-8") == figure(), "run `python -m benchmarks.planner.schedule_figure`"


@pytest.mark.parametrize("schedule", Schedule)
def test_each_row_shows_the_passes_of_the_engines_program_in_their_order(schedule: Schedule) -> None:
    """Catches a drawing of something else than what runs: rows are read back from the file."""
    chunks = FEWEST_CHUNKS[schedule.value]
    where = placement(schedule, STAGES, chunks)
    shown = _rows()[list(Schedule).index(schedule) * STAGES :][:STAGES]
    programs = training_programs(schedule, STAGES, MICRO_BATCHES, chunks)
    for stage, (titles, program) in enumerate(zip(shown, programs, strict=True)):
        mine = [position for position, holder in enumerate(where) if holder == stage]
        expected = [
            f"{each.kind} of micro-batch {each.micro_batch}, chunk {mine.index(each.position)}"
            for each in program
            if isinstance(each, Compute)
        ]
        assert _with_parts(titles, program) == expected, f"{schedule}, stage {stage}"


def test_the_rows_are_as_long_as_the_closed_forms_say() -> None:
    widths = [float(each.get("width", 0)) for each in _boxes("idle")][1:]  # the first is the legend's
    longest = max(widths)
    for index, schedule in enumerate(Schedule):
        bubbles = [1 + bubble_closed_form(each, STAGES, MICRO_BATCHES, FEWEST_CHUNKS[each.value]) for each in Schedule]
        assert widths[STAGES * index] == pytest.approx(longest * bubbles[index] / max(bubbles), abs=0.02), schedule


def _boxes(class_: str) -> list:
    return [each for each in parse(FIGURE).iter(f"{SVG}rect") if class_ in each.get("class", "").split()]


def _rows() -> list[list[str]]:
    """Returns the titles of each row's boxes, from left to right."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for box in _boxes("pass"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert x >= LEFT
        rows.setdefault(y, []).append((x, box.findtext(f"{SVG}title", "")))
    return [[title for _, title in sorted(rows[y])] for y in sorted(rows)]


def _with_parts(titles: list[str], program: tuple) -> list[str]:
    """Writes whole backwards as their two parts where the program has only those."""
    kinds = {each.kind for each in program if isinstance(each, Compute)}
    if PassKind.BACKWARD in kinds:
        return titles
    whole = f"{PassKind.BACKWARD} of"
    parts = (PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT)
    return [
        part
        for title in titles
        for part in ([title.replace(whole, f"{kind} of") for kind in parts] if title.startswith(whole) else [title])
    ]
