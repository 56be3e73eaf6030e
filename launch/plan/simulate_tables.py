"""What `megalite plan simulate` prints: tables and a timeline for people, values for programs. No torch here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launch.plan.output import console, print_csv, print_json, show_table
from megalite.planner.reliability_interval import time_shares
from megalite.planner.run_simulation import HOUR_S, PARTS, Outcome, Run, Spread
from megalite.planner.spare_nodes import spare_nodes_for
from megalite.planner.stragglers import expected_maximum, probability_of_any

if TYPE_CHECKING:
    from rich.console import Console

    from launch.plan.simulate_command import Simulated

TIMELINE = 90  # columns
BAR = 50
HEIGHTS = " ▁▂▃▄▅▆▇█"


def show(simulated: Sequence[Simulated], gpus: int) -> None:
    """For people."""
    to = console()
    for line in assumptions(simulated[0].run, gpus):
        to.print(line)
    _show_table(simulated, to)
    first = simulated[0]
    for line in (*timeline(first.run, first.outcomes[0]), "", *cost_histogram(first.outcomes)):
        to.print(line)
    for notice in notices(simulated):
        to.print(f"megalite: {notice}")


def assumptions(run: Run, gpus: int) -> list[str]:
    """What the result rests on, one fact a line."""
    spare = "always a spare one" if run.spare_nodes is None else f"{run.spare_nodes} spare ones"
    background = run.save.duration_s - run.save.blocked_s
    return [
        f"{gpus:,} GPUs on {run.nodes:,} nodes ({spare}, repaired after {run.repair_s / HOUR_S:g} h) for "
        f"{run.duration_s / HOUR_S / 24:g} days; {run.rate_per_1000_node_days:g} failures per 1,000 node-days, one "
        f"every {_hours(run.mean_time_between_failures_s)}",
        f"a checkpoint after every {run.interval_s / 60:.3g} min of training, which blocks {run.save.blocked_s:g} s"
        + (f" and is usable {background:g} s later" if background else ""),
        f"a crash is noticed after {run.detection_s / 60:g} min, a hang ({run.hang_share:.0%} of failures) after "
        f"{run.hang_timeout_s / 60:g} min; a restart takes {run.restart_s / 60:g} min",
    ]


def notices(simulated: Sequence[Simulated]) -> list[str]:
    """What to know beside the table."""
    run = simulated[0].run
    told = []
    if run.interval_s + run.save.blocked_s < run.save.duration_s:
        told.append(
            f"one checkpoint at a time is written: they come every {run.cycle_s / 60:.3g} min, not every "
            f"{run.interval_s / 60:.3g}"
        )
    if run.slow_node_share and run.slow_node_slowdown:
        told.append(
            f"the probability of a slow node among {run.nodes:,} is "
            f"{probability_of_any(run.nodes, run.slow_node_share):.1%}, and one holds up every step: an upper "
            "limit, for nodes that are slower in all they do and never found out"
        )
    if (
        run.spare_nodes is not None
        and simulated[0].summary.hours["waiting for nodes"].mean * HOUR_S > run.duration_s / 100
    ):
        out = run.repair_s / run.mean_time_between_failures_s * run.lost_node_share
        told.append(
            f"{out:.3g} nodes would be under repair on average: with {spare_nodes_for(0.01, out)} spare ones the job "
            "waits less than 1% of the time (Erlang B)"
        )
    if run.step_jitter:
        told.append(
            f"the slowest of {run.nodes:,} nodes is expected {expected_maximum(run.nodes):.2f} standard deviations "
            "late, if each step meets them independently"
        )
    if run.hang_share == 0:
        told.append("no failure is a hang: give --hang-share; of Llama 3's 419, 7 were noticed by NCCL's timeout")
    return told


def closed_form(run: Run) -> float | None:
    """Goodput after Daly 2006, for what that knows: no stragglers, no shortage of nodes, failures at any time alike.

    Nothing fails until a failure is noticed, so that time is added to the one between failures.
    """
    has_more = run.step_jitter or (run.slow_node_share and run.slow_node_slowdown) or run.spare_nodes is not None
    if has_more or run.infant_mortality_shape != 1 or not run.expected_failures:
        return None
    detection_s = run.detection_s + run.hang_share * (run.hang_timeout_s - run.detection_s)
    interval_s, mtbf_s = run.cycle_s - run.save.blocked_s, run.mean_time_between_failures_s
    return time_shares(interval_s, run.save, mtbf_s, run.restart_s).productive * mtbf_s / (mtbf_s + detection_s)


def timeline(run: Run, outcome: Outcome) -> list[str]:
    """When one run fails, and how much of each slice of its time is lost to it."""
    slice_s = run.duration_s / TIMELINE
    failures: Counter[int] = Counter()
    lost_s: Counter[int] = Counter()
    for each in outcome.interruptions:
        place = min(TIMELINE - 1, int(each.at_s / slice_s))
        failures[place] += 1
        lost_s[place] += math.ceil(each.rework_s + each.detection_s + each.waiting_s + each.restart_s)
    signs = "".join(_count(failures[place]) for place in range(TIMELINE))
    heights = "".join(
        HEIGHTS[min(len(HEIGHTS) - 1, math.ceil(lost_s[place] / slice_s * (len(HEIGHTS) - 1)))]
        for place in range(TIMELINE)
    )
    return [
        f"run of seed {outcome.seed}: failures in each {_hours(slice_s)}, and what they cost of it (full height: all)",
        signs,
        heights.rstrip() or "nothing is lost",
    ]


def cost_histogram(outcomes: Sequence[Outcome]) -> list[str]:
    """How much one failure costs, over all runs: each line is up to twice the one above."""
    costs = [
        each.rework_s + each.detection_s + each.waiting_s + each.restart_s
        for outcome in outcomes
        for each in outcome.interruptions
    ]
    if not costs:
        return ["no run fails"]
    classes = Counter(max(0, math.ceil(math.log2(cost / 60))) if cost > 60 else 0 for cost in costs)
    most = max(classes.values())
    lines = [f"what one failure costs, rework and all ({len(costs):,} of {len(outcomes)} runs)"]
    for power in range(min(classes), max(classes) + 1):
        count = classes[power]
        lines.append(f"{'up to ' + _hours(60 * 2**power):>14} {'#' * math.ceil(BAR * count / most)} {count:,}".rstrip())
    return lines


def rows(simulated: Sequence[Simulated], gpus: int) -> list[dict[str, Any]]:
    """One for each simulated run, all numbers under names with their units."""
    return [
        {
            "gpus": gpus,
            "nodes": each.run.nodes,
            "rate_per_1000_node_days": each.run.rate_per_1000_node_days,
            "interval_s": each.run.interval_s,
            "seed": outcome.seed,
            "goodput": outcome.goodput,
            "effective_training_time": outcome.effective_training_time,
            "failures": len(outcome.interruptions),
            "hangs": sum(one.is_hang for one in outcome.interruptions),
            "checkpoints": outcome.checkpoints,
            **{f"{part.replace(' ', '_')}_hours": outcome.hours[part] for part in PARTS},
        }
        for each in simulated
        for outcome in each.outcomes
    ]


def print_rows(simulated: Sequence[Simulated], gpus: int) -> None:
    """As CSV."""
    print_csv(rows(simulated, gpus))


def show_json(simulated: Sequence[Simulated], gpus: int) -> None:
    """Assumptions and summaries, and each run."""
    values = {
        "assumptions": asdict(simulated[0].run),
        "rates": [
            {
                "rate_per_1000_node_days": each.run.rate_per_1000_node_days,
                "mean_time_between_failures_hours": each.run.mean_time_between_failures_s / HOUR_S
                if each.run.expected_failures
                else None,
                "closed_form_goodput": closed_form(each.run),
                **asdict(each.summary),
            }
            for each in simulated
        ],
        "runs": rows(simulated, gpus),
        "notices": notices(simulated),
    }
    print_json(values)


def _show_table(simulated: Sequence[Simulated], to: Console) -> None:
    run, summary = simulated[0].run, simulated[0].summary
    forms = [closed_form(each.run) for each in simulated]
    rows: list[tuple[str, ...] | None] = [
        *((f"{part}, h", *(_spread(each.summary.hours[part]) for each in simulated)) for part in PARTS),
        None,
        ("failures", *(_spread(each.summary.failures) for each in simulated)),
        ("of these hangs", *(_spread(each.summary.hangs) for each in simulated)),
        ("effective training time", *(_percent(each.summary.effective_training_time) for each in simulated)),
        ("goodput", *(_percent(each.summary.goodput) for each in simulated)),
    ]
    if any(form is not None for form in forms):
        rows.append(("goodput, closed form", *("" if form is None else f"{form:.1%}" for form in forms)))
    show_table(
        f"where {run.duration_s / HOUR_S:,.4g} h go, by failures per 1,000 node-days: mean of {summary.seeds} runs ± "
        "their standard deviation",
        ("", *(f"{each.run.rate_per_1000_node_days:g} per 1,000\nnode-days" for each in simulated)),
        rows,
        to=to,
    )


def _spread(value: Spread) -> str:
    return f"{value.mean:,.1f} ± {value.deviation:,.1f}"


def _percent(value: Spread) -> str:
    return f"{100 * value.mean:.1f} ± {value.deviation:.1%}"


def _count(failures: int) -> str:
    """One column for any number."""
    return "." if not failures else str(failures) if failures < 10 else "+"


def _hours(seconds: float) -> str:
    if seconds == math.inf:
        return "never"
    return f"{seconds / HOUR_S:,.3g} h" if seconds >= 2 * HOUR_S else f"{seconds / 60:.3g} min"
