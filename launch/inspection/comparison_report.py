"""Output of `megalite compare`: tables and sentences. No torch.

Names and values come from files that anyone may have made: what prints them escapes control characters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from launch.inspection.comparison import ComparedRun, Comparison, PairComparison, StepDifference
from launch.output import Cell, Table, styled
from megalite.checkpoint.manifest import printable
from megalite.monitor.steps.parts import PARTS
from megalite.units import count, percent, plural, seconds

MOST_OPTIONS = 40
LONGEST_VALUE = 60  # characters of an option
SMALLEST_PART = 0.005  # share of a step, in any run, of a part that is shown


def runs_table(comparison: Comparison) -> Table:
    """Builds a table with a row per run."""
    rows = []
    for run, pair in zip(comparison.runs, (None, *comparison.pairs), strict=True):
        evaluation = run.last("evaluation_loss")
        cells = (
            run.name,
            run.layout or "",
            f"{run.last_step:,}",
            _loss(run.last("loss")),
            _loss(evaluation),
            seconds(run.step_s) if run.step_s is not None else "",
            count(run.tokens_per_second) if run.tokens_per_second is not None else "",
            f"{pair.token_speed:.2f} x" if pair is not None and pair.token_speed is not None else "",
        )
        rows.append([printable(cell) for cell in cells])
    columns = ("run", "layout", "step", "loss", "held out", "a step", "tokens/s", "speed to first")
    return Table(columns, rows, text_columns=[0, 1])


def differences_table(comparison: Comparison) -> Table:
    """Builds a table with a row per run but the first: how far its numbers are from that one's; failures in red."""
    rows: list[list[Cell]] = []
    for pair in comparison.pairs:
        cells = (
            pair.second.name,
            f"{pair.steps:,}",
            f"step {pair.beyond.step:,}" if pair.beyond is not None else "never" if pair.steps else "",
            f"{pair.tolerance:g}",
            *map(_difference, (pair.largest, pair.evaluation, pair.gradient_norm)),
            verdict(pair),
        )
        rows.append(styled((printable(cell) for cell in cells), "red" if pair.fails else None))
    columns = ("run", "steps", "beyond", "tolerance", "loss", "held out", "gradient norm", "verdict")
    title = f"largest relative differences from {comparison.runs[0].name}"
    return Table(columns, rows, title, text_columns=[0, 7])


def parts_table(comparison: Comparison) -> Table | None:
    """Builds a table of the parts of a step in each run, the most different first; None if no run recorded them."""
    walls = [sum(run.parts_s.values()) for run in comparison.runs]
    rows = []
    for part, of_runs in comparison.parts.items():
        shares = [(s or 0.0) / wall if wall else 0.0 for s, wall in zip(of_runs, walls, strict=True)]
        if max(shares) >= SMALLEST_PART:
            texts = [
                "" if s is None else f"{seconds(s)} ({percent(share)})"
                for s, share in zip(of_runs, shares, strict=True)
            ]
            rows.append([PARTS[part], *texts])
    if not rows:
        return None
    return Table(
        ("part of a step", *(run.name for run in comparison.runs)),
        rows,
        "mean over steps and ranks; a step above is the median",
    )


def options_table(comparison: Comparison) -> Table | None:
    """Builds a table of the options that differ; None if none does."""
    shown = comparison.options[:MOST_OPTIONS]
    if not shown:
        return None
    rows = [[printable(one.name), *map(option_text, one.values)] for one in shown]
    columns = ("option", *(run.name for run in comparison.runs))
    return Table(columns, rows, text_columns=list(range(len(columns))))


def option_text(value: Any) -> str:
    """Formats the value of an option for a cell, in YAML's words; a long one is cut."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return printable(text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "...")


def verdict(pair: PairComparison) -> str:
    """Returns the result of a comparison in a word or two."""
    if pair.obstacles:
        return "need not agree"
    return "agrees" if pair.agrees else "differs" if pair.steps else "nothing to compare"


def sentences(comparison: Comparison) -> Iterator[str]:
    """Yields what the comparison says, the verdicts last."""
    for run in comparison.runs:
        for problem in run.history.problems:
            yield f"not read: {problem}"
    hidden = len(comparison.options) - MOST_OPTIONS
    if hidden > 0:
        yield f"{plural(hidden, 'more option')} {'differs' if hidden == 1 else 'differ'}: --json has all"
    yield from dict.fromkeys(note for pair in comparison.pairs for note in pair.notes)
    yield from map(conclusion, comparison.pairs)


def conclusion(pair: PairComparison) -> str:
    """Returns a sentence: whether two runs agree, where they part, and what that means."""
    first, second = pair.first.name, pair.second.name
    if not pair.steps:
        found = f"{second} and {first} have no step to compare"
        return found + (f", and need not agree: {'; '.join(pair.obstacles)}" if pair.obstacles else "")
    if pair.beyond is None:
        at_all = f"at all {plural(pair.steps, 'step')}"
        found = f"the losses of {second} are within {pair.tolerance:g} of those of {first} {at_all}"
    else:
        one = pair.beyond
        found = (
            f"the losses of {second} and {first} differ by more than {pair.tolerance:g} from step {one.step:,} on "
            f"({_loss(one.second)} and {_loss(one.first)})"
        )
    if pair.obstacles:
        return f"{found}; they need not agree: {'; '.join(pair.obstacles)}"
    if pair.beyond is None:
        return f"{found}: they agree"
    found += ", although both learn from the same samples by the same rule"
    if pair.spike is not None:
        found += (
            f"; the gradient norm was {pair.spike.first:.3g} at step {pair.spike.step:,}, which magnifies differences "
            "of rounding: see whether they part without it, with a longer warm-up or a lower learning rate"
        )
    return found


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison as plain values for `--json`."""
    return {
        "differs": comparison.fails,
        "runs": [_run_as_json(run) for run in comparison.runs],
        "against_first": [
            {
                "run": pair.second.name,
                "verdict": verdict(pair),
                "sentence": conclusion(pair),
                "tolerance": pair.tolerance,
                "need_not_agree": list(pair.obstacles),
                "steps": pair.steps,
                "first_beyond": _as_dict(pair.beyond),
                "largest_loss": _as_dict(pair.largest),
                "largest_evaluation_loss": _as_dict(pair.evaluation),
                "largest_grad_norm": _as_dict(pair.gradient_norm),
                "gradient_spike": _as_dict(pair.spike),
                "step_speed": pair.step_speed,
                "token_speed": pair.token_speed,
                "notes": list(pair.notes),
            }
            for pair in comparison.pairs
        ],
        "options": [{"name": one.name, "values": list(one.values)} for one in comparison.options],
    }


def _run_as_json(run: ComparedRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "layout": run.layout,
        "step": run.last_step,
        "loss": run.last("loss"),
        "evaluation_loss": run.last("evaluation_loss"),
        "step_s": run.step_s,
        "tokens_per_second": run.tokens_per_second,
        "parts_s": dict(run.parts_s),
        "problems": list(run.history.problems),
    }


def _as_dict(difference: StepDifference | None) -> dict[str, Any] | None:
    return None if difference is None else asdict(difference)


def _difference(difference: StepDifference | None) -> str:
    if difference is None:
        return ""
    size = "not a number" if math.isinf(difference.relative) else f"{difference.relative:.1e}"
    return f"{size}, step {difference.step:,}" if difference.relative else "none"


def _loss(value: float | None) -> str:
    return "" if value is None else "no number" if not math.isfinite(value) else f"{value:.4f}"
