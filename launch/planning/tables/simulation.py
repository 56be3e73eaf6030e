"""Output of `megalite plan simulate`: a table, a timeline, and values for JSON and CSV. No torch here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.output import Table
from launch.planning.tables.forecast import money
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from megalite.planner.cost.checkpoints import time_shares
from megalite.planner.failure_rates import failure_probability
from megalite.planner.reliability.run_simulation import (
    HOUR_S,
    PARTS,
    Outcome,
    SimulatedJob,
    Spread,
    Summary,
    expected_maximum,
    spare_nodes_for,
)
from megalite.units import count, short

log = get_logger(__name__)


@dataclass(frozen=True)
class Simulated:
    """All simulated runs of one failure rate."""

    run: SimulatedJob
    outcomes: tuple[Outcome, ...]
    summary: Summary


TIMELINE = 90  # columns
BAR = 50
HEIGHTS = " ▁▂▃▄▅▆▇█"


def show(simulated: Sequence[Simulated], gpus: int, price: float | None, remarks: Sequence[str]) -> None:
    """Prints assumptions, the table, the timeline of one run and a histogram of the costs of failures.

    `price`: of an accelerator-hour; `remarks`: more notices.
    """
    first = simulated[0]
    say(*assumptions(first.run, gpus), sep="\n")
    _hours_table(simulated).print()
    if price is not None:
        hours = accelerator_hours(first.run, gpus)
        say(f"price: {money(hours * price)} for {count(hours)} accelerator-hours at {price:g}")
    say(*timeline(first.run, first.outcomes[0]), "", *cost_histogram(first.outcomes), sep="\n")
    for notice in (*remarks, *notices(simulated)):
        log.info(notice)


def assumptions(run: SimulatedJob, gpus: int) -> list[str]:
    """The assumptions behind the result, one per line."""
    spare = "always a spare one" if run.spare_nodes is None else f"{run.spare_nodes} spare ones"
    background = run.save.duration_s - run.save.blocked_s
    return [
        f"{gpus:,} GPUs on {run.nodes:,} nodes ({spare}, repaired after {run.repair_s / HOUR_S:g} h) for "
        f"{run.duration_s / HOUR_S / 24:.4g} days; {run.rate_per_1000_node_days:g} failures per 1,000 node-days, one "
        f"every {_hours(run.mean_time_between_failures_s)}",
        f"a checkpoint after every {run.interval_s / 60:.3g} min of training, which blocks {run.save.blocked_s:.3g} s"
        + (f" and is usable {background:.3g} s later" if background else ""),
        f"a crash is noticed after {run.detection_s / 60:g} min, a hang ({run.hang_share:.0%} of failures) after "
        f"{run.hang_timeout_s / 60:g} min; a restart takes {run.restart_s / 60:g} min",
    ]


def notices(simulated: Sequence[Simulated]) -> list[str]:
    """Caveats and advice printed below the table."""
    run = simulated[0].run
    sentences = []
    if run.interval_s + run.save.blocked_s < run.save.duration_s:
        sentences.append(
            f"one checkpoint at a time is written: they come every {run.cycle_s / 60:.3g} min, not every "
            f"{run.interval_s / 60:.3g}"
        )
    if run.slow_node_share and run.slow_node_slowdown:
        sentences.append(
            f"the probability of a slow node among {run.nodes:,} is "
            f"{failure_probability(run.slow_node_share, run.nodes):.1%}, and one holds up every step: an upper "
            "limit, for nodes that are slower in all they do and never found out"
        )
    if (
        run.spare_nodes is not None
        and simulated[0].summary.hours["waiting for nodes"].mean * HOUR_S > run.duration_s / 100
    ):
        out = run.repair_s / run.mean_time_between_failures_s * run.lost_node_share
        sentences.append(
            f"{out:.3g} nodes would be under repair on average: with {spare_nodes_for(0.01, out)} spare ones the job "
            "waits less than 1% of the time (Erlang B)"
        )
    if run.step_jitter:
        sentences.append(
            f"the slowest of {run.nodes:,} nodes is expected {expected_maximum(run.nodes):.2f} standard deviations "
            "late, if each step meets them independently"
        )
    if run.hang_share == 0:
        sentences.append("no failure is a hang: give --hang-share; of Llama 3's 419, 7 were noticed by NCCL's timeout")
    return sentences


def closed_form(run: SimulatedJob) -> float | None:
    """Goodput by the closed form of Daly 2006. None for a job that it does not cover: one with stragglers, a limited
    number of spare nodes, or failures that are not exponentially distributed.

    Nothing fails until a failure is noticed, so the time to detection is added to the mean time between failures.
    """
    has_more = run.step_jitter or (run.slow_node_share and run.slow_node_slowdown) or run.spare_nodes is not None
    if has_more or run.infant_mortality_shape != 1 or not run.expected_failures:
        return None
    detection_s = run.detection_s + run.hang_share * (run.hang_timeout_s - run.detection_s)
    interval_s, mtbf_s = run.cycle_s - run.save.blocked_s, run.mean_time_between_failures_s
    return time_shares(interval_s, run.save, mtbf_s, run.restart_s).productive * mtbf_s / (mtbf_s + detection_s)


def timeline(run: SimulatedJob, outcome: Outcome) -> list[str]:
    """Draws one run: its failures, and the share of each slice of time that is lost to them."""
    slice_s = run.duration_s / TIMELINE
    failures: Counter[int] = Counter()
    lost_s: Counter[int] = Counter()
    for each in outcome.interruptions:
        place = min(TIMELINE - 1, int(each.at_s / slice_s))
        failures[place] += 1
        lost_s[place] += math.ceil(each.cost_s)
    signs = "".join("." if not n else str(n) if n < 10 else "+" for n in (failures[at] for at in range(TIMELINE)))
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
    """A histogram of the cost of one failure over all runs, in classes that double."""
    costs = [each.cost_s for outcome in outcomes for each in outcome.interruptions]
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
    """One row of the CSV output per simulated run; the names of columns carry the units."""
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


def accelerator_hours(run: SimulatedJob, gpus: int) -> float:
    """Hours of wall time times GPUs."""
    return run.duration_s / HOUR_S * gpus


def as_values(simulated: Sequence[Simulated], gpus: int, price: float | None, remarks: Sequence[str]) -> dict[str, Any]:
    """Assumptions, summaries and every run for `--json`."""
    hours = accelerator_hours(simulated[0].run, gpus)
    return {
        "assumptions": asdict(simulated[0].run),
        "accelerator_hours": hours,
        "price": None if price is None else hours * price,
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
        "notices": [*remarks, *notices(simulated)],
    }


def _hours_table(simulated: Sequence[Simulated]) -> Table:
    run, summary = simulated[0].run, simulated[0].summary
    forms = [closed_form(each.run) for each in simulated]
    rows: list[tuple[str, ...] | None] = [
        *((f"{part}, h", *(_spread(each.summary.hours[part]) for each in simulated)) for part in PARTS),
        None,
        ("failures", *(_spread(each.summary.failures) for each in simulated)),
        ("of which hangs", *(_spread(each.summary.hangs) for each in simulated)),
        ("effective training time", *(_percent(each.summary.effective_training_time) for each in simulated)),
        ("goodput", *(_percent(each.summary.goodput) for each in simulated)),
    ]
    if any(form is not None for form in forms):
        rows.append(("goodput, closed form", *("" if form is None else f"{form:.1%}" for form in forms)))
    return Table(
        ("", *(f"{each.run.rate_per_1000_node_days:g} per 1,000\nnode-days" for each in simulated)),
        rows,
        title=f"hours of {run.duration_s / HOUR_S:,.4g} h, by failures per 1,000 node-days: mean of {summary.seeds} "
        "runs ± their standard deviation",
    )


def _spread(value: Spread) -> str:
    return f"{value.mean:,.1f} ± {value.deviation:,.1f}"


def _percent(value: Spread) -> str:
    return f"{100 * value.mean:.1f} ± {value.deviation:.1%}"


def _hours(seconds: float) -> str:
    if seconds == math.inf:
        return "never"
    return f"{short(seconds / HOUR_S)} h" if seconds >= 2 * HOUR_S else f"{seconds / 60:.3g} min"
