"""A pipeline's timeline as lines of text, one for each stage, as wide as a terminal. No torch."""

from __future__ import annotations

import math

from megalite.planner.schedules import Kind, Schedule, Timeline

IDLE = "."
FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "=", Kind.INPUT_GRADIENT: "=", Kind.WEIGHT_GRADIENT: "~"}
ROUNDING = 1e-9
NARROWEST = 12  # columns that a drawing needs beside its labels


def draw(timeline: Timeline, columns: int = 100) -> list[str]:
    """A line for each stage, at most `columns` wide.

    Work begins with the number of its micro-batch and goes on with a sign for its kind. Where the shortest work is less
    than a column, a column shows what the stage does most of that time, without numbers.
    """
    label = len(f"stage {timeline.stages - 1} ")
    most = max(NARROWEST, columns - label)
    column_s = _column_s(timeline, most)
    rows = _coarse_rows(timeline, most) if column_s is None else _rows(timeline, column_s)
    return [f"stage {stage}".ljust(label) + row for stage, row in enumerate(rows)]


def legend(timeline: Timeline) -> str:
    """What the signs mean."""
    backward = (
        f"{FILL[Kind.INPUT_GRADIENT]} input gradient, {FILL[Kind.WEIGHT_GRADIENT]} weight gradient"
        if timeline.schedule is Schedule.ZERO_BUBBLE
        else f"{FILL[Kind.BACKWARD]} backward"
    )
    return f"{FILL[Kind.FORWARD]} forward, {backward}, {IDLE} idle; numbers are micro-batches"


def _column_s(timeline: Timeline, columns: int) -> float | None:
    """Seconds that a column stands for, so that the shortest work is a whole number of columns. None: no room."""
    shortest_s = min((work.end_s - work.start_s for work in timeline.work if work.end_s > work.start_s), default=1.0)
    per_work = math.floor(shortest_s * columns / timeline.makespan_s + ROUNDING) if timeline.makespan_s else 1
    return shortest_s / per_work if per_work else None


def _rows(timeline: Timeline, column_s: float) -> list[str]:
    rows = [[IDLE] * max(1, math.ceil(timeline.makespan_s / column_s - ROUNDING)) for _ in range(timeline.stages)]
    for work in timeline.work:
        first, last = round(work.start_s / column_s), round(work.end_s / column_s)
        name, sign = str(work.micro_batch), FILL[work.kind]
        text = name if len(name) <= last - first else ""
        rows[work.stage][first:last] = text.ljust(last - first, sign)
    return ["".join(row) for row in rows]


def _coarse_rows(timeline: Timeline, columns: int) -> list[str]:
    column_s = timeline.makespan_s / columns
    spent: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in range(timeline.stages)]
    for work in timeline.work:
        row, sign = spent[work.stage], FILL[work.kind]
        for column in range(int(work.start_s / column_s), min(columns, math.ceil(work.end_s / column_s))):
            inside_s = min(work.end_s, (column + 1) * column_s) - max(work.start_s, column * column_s)
            row[column][sign] = row[column].get(sign, 0.0) + inside_s
    return ["".join(_most(signs, column_s) for signs in row) for row in spent]


def _most(signs: dict[str, float], column_s: float) -> str:
    idle_s = column_s - sum(signs.values())
    return max([(idle_s, IDLE), *((seconds, sign) for sign, seconds in signs.items())])[1]
