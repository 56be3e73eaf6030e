"""Drawings of a simulated pipeline schedule as text."""

from __future__ import annotations

import math

from megalite.schedules.passes import PassKind
from megalite.schedules.simulation import Timeline

IDLE = "."
ELSEWHERE = " "  # the stage works on another of its chunks
FILL = {PassKind.FORWARD: "-", PassKind.BACKWARD: "=", PassKind.INPUT_GRADIENT: "<", PassKind.WEIGHT_GRADIENT: "~"}
ROUNDING = 1e-9
NARROWEST = 12  # columns that a drawing needs beside its labels


def draw(timeline: Timeline, columns: int = 100) -> list[str]:
    """Draws one line per stage, or one per chunk of each stage, at most `columns` wide.

    Work begins with the number of its micro-batch and goes on with a sign for its kind; the line of a chunk is blank
    while its stage works on another one. Where the shortest work is less than a column, a column shows what the stage
    does most of that time, without numbers.
    """
    lines = [(stage, chunk) for stage in range(timeline.stages) for chunk in range(timeline.chunks)]
    names = [f"stage {stage} " + (f"chunk {chunk} " if timeline.chunks > 1 else "") for stage, chunk in lines]
    label = max(map(len, names))
    most = max(NARROWEST, columns - label)
    # the shortest pass is a whole number of columns, if there is room
    shortest_s = min((work.end_s - work.start_s for work in timeline.work if work.end_s > work.start_s), default=1.0)
    per_work = math.floor(shortest_s * most / timeline.makespan_s + ROUNDING) if timeline.makespan_s else 1
    rows = _rows(timeline, shortest_s / per_work) if per_work else _coarse_rows(timeline, most)
    return [name.ljust(label) + row for name, row in zip(names, rows, strict=True)]


def legend(timeline: Timeline) -> str:
    """Explains the characters of the drawing."""
    kinds = {work.kind for work in timeline.work}
    signs = [f"{FILL[kind]} {kind}" for kind in PassKind if kind in kinds]
    elsewhere = ", blank at work on another chunk" if timeline.chunks > 1 else ""
    return ", ".join(signs) + f", {IDLE} idle{elsewhere}; numbers are micro-batches"


def _rows(timeline: Timeline, column_s: float) -> list[str]:
    columns = max(1, math.ceil(timeline.makespan_s / column_s - ROUNDING))
    chunks = timeline.chunks
    rows = [[IDLE] * columns for _ in range(timeline.stages * chunks)]
    for work in timeline.work:
        first, last = round(work.start_s / column_s), round(work.end_s / column_s)
        name, sign = str(work.micro_batch), FILL[work.kind]
        text = name if len(name) <= last - first else ""
        for chunk in range(chunks):
            drawn = text.ljust(last - first, sign) if chunk == work.chunk else ELSEWHERE * (last - first)
            rows[work.stage * chunks + chunk][first:last] = drawn
    return ["".join(row) for row in rows]


def _coarse_rows(timeline: Timeline, columns: int) -> list[str]:
    """Gives each column to what takes the longest part of it: idle time, or a kind of pass through a chunk."""
    column_s, chunks = timeline.makespan_s / columns, timeline.chunks
    spent: list[list[dict[tuple[str, int], float]]] = [[{} for _ in range(columns)] for _ in range(timeline.stages)]
    for work in timeline.work:
        row, key = spent[work.stage], (FILL[work.kind], work.chunk)
        for column in range(int(work.start_s / column_s), min(columns, math.ceil(work.end_s / column_s))):
            inside_s = min(work.end_s, (column + 1) * column_s) - max(work.start_s, column * column_s)
            row[column][key] = row[column].get(key, 0.0) + inside_s

    def longest(of_column: dict[tuple[str, int], float]) -> tuple[str, int]:
        idle_s = column_s - sum(of_column.values())
        return max([(idle_s, (IDLE, 0)), *((seconds, key) for key, seconds in of_column.items())])[1]

    rows = []
    for row in spent:
        shown = [longest(of_column) for of_column in row]
        for chunk in range(chunks):
            rows.append("".join(sign if sign == IDLE or at == chunk else ELSEWHERE for sign, at in shown))
    return rows
