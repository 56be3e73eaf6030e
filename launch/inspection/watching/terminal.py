"""A run on a terminal while it trains: `megalite watch --terminal`.

On a terminal a screen whose lines change in place; elsewhere a line per look at which the run has gone on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.inspection.history import RunHistory
from launch.inspection.run_files import Facts, number
from launch.inspection.state import RunState
from launch.inspection.status import RunStatus, read_status
from launch.inspection.status_output import progress_text, speed_text
from launch.inspection.watching.live_run import LiveRun
from launch.output import Cell, StyledCell
from megalite.checkpoint.manifest import printable
from megalite.monitor.steps.parts import PARTS
from megalite.units import percent

HEIGHTS = "▁▂▃▄▅▆▇█"
INTERVAL_S = 2.0  # from look to look
LABEL = 11  # columns before what a line shows
LONGEST_BAR = 100
MOST_STAGES = 16
SMALLEST = 0.02  # share of a part that is named
STYLES = {  # of parts, in colours that are told apart also by who sees no red or green
    "forward": "blue",
    "backward": "cyan",
    "tensor_collectives": "yellow",
    "context_collectives": "yellow",
    "expert_collectives": "yellow",
    "gradient_sync": "bright_yellow",
    "weights_sync": "bright_yellow",
    "pipeline_transfer": "magenta",
    "pipeline_wait": "bright_black",
    "optimizer": "green",
    "evaluation": "bright_blue",
    "checkpoint": "bright_magenta",
    "data": "red",
}
FILLS = {"pipeline_wait": "░", "other": "░", "meeting": "▒", "tensor_collectives": "▓", "pipeline_transfer": "▓"}
STATES = {RunState.RUNNING: "bold green", RunState.WAITING: "bold yellow", RunState.ENDED: "bold"}


def screen(status: RunStatus, history: RunHistory, width: int) -> list[list[Cell]]:
    """Returns the lines of a screen of so many columns."""
    state = StyledCell(status.state, STATES.get(status.state, "bold red"))
    lines: list[list[Cell]] = [[f"{printable(str(status.run_dir))}: ", state, f": {printable(status.reason)}"]]
    room = min(LONGEST_BAR, max(20, width - LABEL - 30))
    if text := progress_text(status):
        lines.append(_line("progress", text))
    if text := speed_text(status):
        lines.append(_line("speed", text))
    for name, column in {"loss": "loss", "held out": "evaluation_loss", "tokens/s": "tokens_per_second"}.items():
        numbers = history.column(column)
        if known := numbers[np.isfinite(numbers)].tolist():
            lines.append(_line(name, sparkline(known, room), f"  {known[0]:,.5g} -> {known[-1]:,.5g}"))
    lines += _stage_lines(history, room, width)
    for event in history.files.slow_ranks:
        told = printable(str(event.get("sentence", f"rank {event.get('rank')}")))
        lines.append(_line("slow", StyledCell(told, "bold red")))
    for problem in status.problems:
        lines.append(_line("not read", printable(problem)))
    return lines


def plain_line(status: RunStatus, history: RunHistory) -> str:
    """Returns one line about the run, for a pipe or a file."""
    parts = format_shares(_latest(history))
    slow = "; ".join(f"rank {printable(str(event.get('rank')))} is slow" for event in history.files.slow_ranks)
    texts = (progress_text(status), speed_text(status), parts, slow)
    return f"{time.strftime('%H:%M:%S')} {status.state}: {'; '.join(text for text in texts if text) or status.reason}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws values as blocks of eight heights; more than `width` are drawn as means of neighbours."""
    column = np.asarray(values, float)
    if len(column) > width:
        column = np.array([part.mean() for part in np.array_split(column, width)])
    low, high = column.min(), column.max()
    scaled = (column - low) / (high - low) if high > low else np.zeros(len(column))
    return "".join(HEIGHTS[int(value * (len(HEIGHTS) - 1) + 0.5)] for value in scaled)


def shares(seconds: Facts) -> dict[str, float]:
    """Returns the shares of a step's parts, the largest first, of those that are known by name and took time."""
    known = {part: found for part in PARTS if (found := number(seconds.get(part))) is not None and found > 0}
    whole = sum(known.values())
    return {part: known[part] / whole for part in sorted(known, key=lambda part: -known[part])}


def format_shares(seconds: Facts, least: float = SMALLEST) -> str:
    """Names the parts of a step that take at least that share of it, the largest first."""
    return ", ".join(f"{PARTS[part]} {share:.0%}" for part, share in shares(seconds).items() if share >= least)


def bar(parts: Facts, width: int) -> list[Cell]:
    """Draws the shares of a step's parts side by side, in the order of a step, exactly `width` columns wide."""
    found = shares(parts)
    cells: list[Cell] = []
    done, at = 0.0, 0
    for part in PARTS:
        done += found.get(part, 0.0)
        until = round(done * width)
        if until > at:
            cells.append(StyledCell(FILLS.get(part, "█") * (until - at), STYLES.get(part, "white")))
        at = until
    return cells


def _stage_lines(history: RunHistory, room: int, width: int) -> Iterator[list[Cell]]:
    """Yields a bar per pipeline stage at the last look of the run at itself, and the names of the colours."""
    if not history.breakdowns:
        return
    last = history.breakdowns[-1]
    stages = [stage for stage in last["stages"] if isinstance(stage, dict) and isinstance(stage.get("mean_s"), dict)]
    seen: dict[str, float] = {}
    for stage in stages[:MOST_STAGES]:
        found = shares(stage["mean_s"])
        for part, share in found.items():
            seen[part] = max(share, seen.get(part, 0.0))
        idle = number(stage.get("idle_ratio"))
        yield _line(
            f"stage {printable(str(stage.get('stage')))[:4]}",
            *bar(stage["mean_s"], room),
            f"  idle {percent(idle)}" if idle is not None else "",
        )
    if len(stages) > MOST_STAGES:
        yield _line("", f"and {len(stages) - MOST_STAGES} stages more")
    yield from _key_lines({part: seen[part] for part in PARTS if seen.get(part, 0.0) >= SMALLEST}, width)


def _key_lines(seen: Mapping[str, float], width: int) -> Iterator[list[Cell]]:
    """Yields the parts in the colours of their bars, with the largest share that a stage spends in each."""
    line, free = _line(""), width - LABEL
    for part, share in seen.items():
        text = f" {PARTS[part]} {percent(share)}  "
        if len(text) + 2 > free and len(line) > 1:
            yield line
            line, free = _line(""), width - LABEL
        line += [StyledCell(FILLS.get(part, "█") * 2, STYLES.get(part, "white")), text]
        free -= len(text) + 2
    if len(line) > 1:
        yield line


def _latest(history: RunHistory) -> dict[str, Any]:
    """Returns the seconds by part at the last step that recorded them."""
    recorded = np.flatnonzero(np.isfinite(history.column("wall_s")))
    return {part: float(column[recorded[-1]]) for part, column in history.parts_s.items()} if len(recorded) else {}


def _line(name: str, *cells: Cell) -> list[Cell]:
    return [f"{name:<{LABEL}}", *cells]


def is_over(state: RunState) -> bool:
    """Returns whether a run in this state makes no more steps by itself."""
    return state not in (RunState.RUNNING, RunState.WAITING, RunState.HUNG)


def follow(run_dir: Path) -> Iterator[tuple[RunStatus, RunHistory]]:
    """Yields the run every `INTERVAL_S` seconds, until it is over. Raises OSError where it cannot be read."""
    run = LiveRun(run_dir)
    while True:
        history = run.look()
        status = read_status(run_dir)
        yield status, history
        if is_over(status.state):
            return
        time.sleep(INTERVAL_S)
