"""The time that a run still needs, by the steps that it has done lately, and how it is written."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

RECENT_STEPS = 50
ALL_UP_TO, EVERY_S = 100, 0.25  # steps of a session that are all shown; seconds between later ones that are


def seconds_left(steps: float, recent_s: Iterable[float]) -> float | None:
    """Returns the seconds that `steps` more steps take at the median of recent ones; None if there are none.

    A median, so that an evaluation, a save or a step that waited for its data does not move it.
    """
    known = list(recent_s)
    return steps * median(known) if known else None


def clock(seconds: float) -> str:
    """Formats a duration as a clock does: `0:07`, `12:34`, `5:06:07`; from a day on `3 d 04:05`."""
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
    return f"{hours // 24} d {hours % 24:02d}:{minute:02d}"


def format_continuation(checkpoint: int | None) -> str:
    """Returns what the command of a run that has ended too early does when it is given again."""
    if not checkpoint:
        return "the same command begins again with step 1"
    return f"the same command goes on from step {checkpoint:,}"
