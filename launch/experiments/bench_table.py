"""The table of `megalite bench`: a row per variant, and what may be concluded from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launch.experiments.comparison import LEAST_ROUNDS, PointResult, RoundSpread
from launch.inspection.watching.terminal import format_shares
from launch.output import Table
from megalite.units import count, gib, percent, plural, seconds

UNKNOWN = "-"
SMALLEST_PART = 0.03  # share of a step from which the table names a part
COLUMNS = (
    "variant",
    "step time",
    "tokens/s",
    "samples/s",
    "communication",
    "peak memory",
    "speed",
    "against the first",
    "where a step goes",
)
TEXT = (0, 7, 8)


def bench_table(results: Sequence[PointResult], steps: int) -> Table:
    """Returns the table of all variants, in the order in which they were given."""
    rounds = max((len(one.runs) for one in results), default=0)
    title = f"step time: median of {plural(steps, 'step')}, median of {plural(rounds, 'round')} ± half their spread"
    rows = [_row(one, is_first=place == 0) for place, one in enumerate(results)]
    return Table(COLUMNS, rows, title, TEXT)


def _row(one: PointResult, *, is_first: bool) -> list[str]:
    if not one.runs:
        return [one.point.name, *[UNKNOWN] * (len(COLUMNS) - 2), one.failure or "not run"]
    step, memory, share = one.spread("step_s"), one.median("memory_mib"), one.median("communication_share")
    failed = f"; a later round failed: {one.failure}" if one.failure else ""
    samples = one.median("samples_per_s")
    return [
        one.point.name,
        with_spread(seconds(step.median), step),
        count(one.spread("tokens_per_s").median),
        UNKNOWN if samples is None else f"{samples:,.3g}",
        UNKNOWN if share is None else percent(share),
        UNKNOWN if memory is None else gib(memory * 2**20),
        UNKNOWN if one.speed is None else with_spread(f"{one.speed.median:.3g}", one.speed),
        "is the first" if is_first else verdict(one),
        (format_shares(one.parts_s, SMALLEST_PART) or "not recorded") + failed,
    ]


def verdict(one: PointResult) -> str:
    """Says in words how a variant compares with the first one."""
    if one.speed is None:
        return "cannot be compared: the first did not run"
    if not one.speed.is_known:
        return f"not known: it takes {LEAST_ROUNDS} rounds"
    if not one.is_distinguishable:
        return "not distinguishable here"
    ratio = one.speed.median
    return f"{ratio:.3g} x as fast" if ratio > 1 else f"{1 / ratio:.3g} x as slow"


def conclusion(results: Sequence[PointResult]) -> str:
    """Returns a sentence about the fastest variant; empty if there is nothing to compare."""
    working = [one for one in results if one.speed is not None]
    if len(working) < 2:
        return ""
    better = [one for one in working[1:] if one.is_distinguishable and one.speed is not None and one.speed.median > 1]
    if not any(one.speed.is_known for one in working if one.speed is not None):
        return f"which variant is faster is not known: it takes {LEAST_ROUNDS} rounds"
    if not better:
        noise = statistics.median(one.speed.width for one in working[1:] if one.speed is not None)
        return (
            f"nothing is measurably faster than {working[0].point.name}; differences below {percent(noise)} cannot be "
            "told from noise here"
        )
    best = max(better, key=lambda one: one.speed.median if one.speed is not None else 0.0)
    return f"fastest: {best.point.name}, {verdict(best)} as {working[0].point.name}"


def with_spread(text: str, spread: RoundSpread) -> str:
    """Adds half the spread over the rounds, relative to the median; nothing after a single round."""
    return f"{text} ± {percent(spread.width / 2 / spread.median)}" if len(spread.values) > 1 else text
