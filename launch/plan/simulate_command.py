"""`megalite plan simulate`: long runs with failures, hangs, spare nodes, checkpoints and stragglers, simulated. No
torch here."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from launch.arguments import AsJson
from launch.errors import LaunchError
from megalite.config import ConfigError
from megalite.planner.reliability_interval import Save, best_interval_s
from megalite.planner.reliability_rates import DEFAULT_RATE, PUBLISHED_BAND, nodes_of
from megalite.planner.run_simulation import DAY_S, Outcome, Run, Summary, simulate, summarise

LONG = 200_000  # failures to simulate, about 2 seconds: from there on progress is shown
MOST_FAILURES = 3_000_000  # of all runs together: half a minute, and a gigabyte
MOST_SEEDS = 10_000
LEAST_INTERVAL_S = 0.06  # no step is shorter
REPAIR_HOURS = 24.0


@dataclass(frozen=True)
class Simulated:
    """One failure rate, over all seeds."""

    run: Run
    outcomes: tuple[Outcome, ...]
    summary: Summary


def simulate_runs(
    gpus: Annotated[int, typer.Option(min=1, help="Of the job, which stops with any of them.")] = 1024,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="A failure takes a whole node.")] = 8,
    days: Annotated[float, typer.Option(help="Length of the run on the wall clock.")] = 30.0,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate-per-1000-node-days",
            help=f"Failures; default {DEFAULT_RATE:.0f}, and the ends of the published band, 2 and 14, beside it.",
        ),
    ] = None,
    save_seconds: Annotated[float, typer.Option(help="From the start of a checkpoint until it is usable.")] = 60.0,
    blocked_seconds: Annotated[
        float | None, typer.Option(help="Training stands still for so much of it; default all: none in the background.")
    ] = None,
    interval: Annotated[
        str, typer.Option(help="Minutes of training between checkpoints; auto: the best (Daly 2006).")
    ] = "auto",
    detection_minutes: Annotated[float, typer.Option(help="From a crash until it is noticed.")] = 5.0,
    hang_share: Annotated[float, typer.Option(help="Of failures, 0 to 1: nothing ends, a timeout notices.")] = 0.0,
    hang_timeout_minutes: Annotated[float, typer.Option(help="From a hang until it is noticed.")] = 30.0,
    restart_minutes: Annotated[float, typer.Option(help="From nodes that are there until training goes on.")] = 5.0,
    spare_nodes: Annotated[
        int | None, typer.Option(min=0, help="Wait for a repair when none is left; default: there is always one.")
    ] = None,
    repair_hours: Annotated[
        float | None, typer.Option(help="Until a failed node is a spare one, with --spare-nodes; default 24.")
    ] = None,
    lost_node_share: Annotated[
        float, typer.Option(help="Of failures, 0 to 1: take the node out; others restart on the same nodes.")
    ] = 1.0,
    infant_mortality_shape: Annotated[
        float, typer.Option(help="Weibull shape; below 1 failures come early; the number expected stays the same.")
    ] = 1.0,
    slow_node_share: Annotated[float, typer.Option(help="Of all nodes, 0 to 1: always slower.")] = 0.0,
    slow_node_slowdown: Annotated[float, typer.Option(help="By this part of a step, as 0.1.")] = 0.1,
    step_jitter: Annotated[
        float, typer.Option(help="Standard deviation of each node's step time, as a part of it.")
    ] = 0.0,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Runs that differ by chance alone.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the first of them; the same seed is the same run.")] = 0,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a line per run as CSV.")] = False,
) -> None:
    """Simulate a long run, failure by failure: where its hours go, and how far that spreads.

    Every step waits for the slowest node. Any number of GPUs and 90 days take a second or a few.

    Example: `megalite plan simulate --gpus 16384 --days 54 --rate-per-1000-node-days 3.8 --spare-nodes 16`
    """
    from launch.plan import simulate_tables as tables

    if as_json and as_csv:
        raise LaunchError("--json and --csv are two ways to print the result: give one of them")
    save = _save(save_seconds, blocked_seconds)
    if repair_hours is not None and spare_nodes is None:
        raise LaunchError(f"--repair-hours {repair_hours:g} is for a number of spare nodes: add --spare-nodes")
    nodes = _nodes(gpus, gpus_per_node)
    here = DEFAULT_RATE if rate is None else _number("--rate-per-1000-node-days", rate)
    run = Run(
        nodes=nodes,
        duration_s=DAY_S * _number("--days", days, above_zero=True),
        interval_s=_interval_s(interval, save, nodes, here),
        save=save,
        rate_per_1000_node_days=here,
        detection_s=60 * _number("--detection-minutes", detection_minutes),
        hang_share=_share("--hang-share", hang_share),
        hang_timeout_s=60 * _number("--hang-timeout-minutes", hang_timeout_minutes),
        restart_s=60 * _number("--restart-minutes", restart_minutes),
        lost_node_share=_share("--lost-node-share", lost_node_share),
        spare_nodes=spare_nodes,
        repair_s=3600 * _number("--repair-hours", REPAIR_HOURS if repair_hours is None else repair_hours),
        infant_mortality_shape=_number("--infant-mortality-shape", infant_mortality_shape, above_zero=True),
        slow_node_share=_share("--slow-node-share", slow_node_share),
        slow_node_slowdown=_number("--slow-node-slowdown", slow_node_slowdown),
        step_jitter=_number("--step-jitter", step_jitter),
    )
    # one interval for all: who chooses it does not know the rate
    rates = (here,) if rate is not None else (here, *PUBLISHED_BAND)
    runs = [replace(run, rate_per_1000_node_days=each) for each in rates]
    simulated = _simulate(runs, range(seed, seed + seeds))
    if as_json:
        tables.show_json(simulated, gpus)
    elif as_csv:
        tables.print_rows(simulated, gpus)
    else:
        tables.show(simulated, gpus)


def _simulate(runs: Sequence[Run], seeds: range) -> list[Simulated]:
    from rich.console import Console
    from rich.progress import track

    failures = sum(run.expected_failures for run in runs) * len(seeds)
    if failures > MOST_FAILURES:
        raise LaunchError(
            f"--seeds {len(seeds)}: {failures:,.0f} failures are expected in all runs, {MOST_FAILURES:,} simulated at "
            f"most: take up to {max(1, int(MOST_FAILURES / failures * len(seeds)))} seeds or fewer days"
        )
    to_do = [(run, seed) for run in runs for seed in seeds]
    is_short = failures < LONG
    console = Console(stderr=True)
    outcomes = [
        simulate(run, seed)
        for run, seed in track(
            to_do, "simulating", console=console, transient=True, disable=is_short or not sys.stderr.isatty()
        )
    ]
    of_runs = [tuple(outcomes[first : first + len(seeds)]) for first in range(0, len(to_do), len(seeds))]
    return [Simulated(run, of_run, summarise(of_run)) for run, of_run in zip(runs, of_runs, strict=True)]


def _save(seconds: float, blocked: float | None) -> Save:
    save_s = _number("--save-seconds", seconds)
    blocked_s = save_s if blocked is None else _number("--blocked-seconds", blocked)
    if blocked_s > save_s:
        raise LaunchError(
            f"--blocked-seconds {blocked_s:g} is more than --save-seconds {save_s:g}, of which it is a part: give at "
            f"most {save_s:g}"
        )
    return Save(blocked_s, save_s)


def _nodes(gpus: int, gpus_per_node: int) -> int:
    try:
        return nodes_of(gpus, gpus_per_node)
    except ConfigError as error:
        raise LaunchError(f"--gpus {gpus}: {error}") from None


def _interval_s(words: str, save: Save, nodes: int, rate: float) -> float:
    interval_s = _best_s(save, nodes, rate) if words == "auto" else 60 * _minutes(words)
    if interval_s < LEAST_INTERVAL_S:
        raise LaunchError(
            f"--interval {words}: {interval_s:.3g} s between checkpoints are less than a step takes: give "
            f"{LEAST_INTERVAL_S / 60:g} minutes or more"
        )
    if save.blocked_s + interval_s / 2 <= save.blocked_s:
        raise LaunchError(f"--blocked-seconds {save.blocked_s:g}: beside them no training is left: give fewer")
    return interval_s


def _minutes(words: str) -> float:
    try:
        minutes = float(words)
    except ValueError:
        raise LaunchError(f"--interval {words}: give minutes, such as 30, or auto") from None
    return _number("--interval", minutes, above_zero=True)


def _best_s(save: Save, nodes: int, rate: float) -> float:
    if not rate:
        raise LaunchError("--interval auto is for runs that fail: with a rate of 0 give minutes, such as 60")
    if not save.blocked_s and not save.duration_s:
        raise LaunchError("--interval auto weighs what a checkpoint costs: with one that costs nothing give minutes")
    return best_interval_s(save.blocked_s, DAY_S * 1000 / (nodes * rate), save.duration_s)


def _number(option: str, value: float, *, above_zero: bool = False) -> float:
    if not math.isfinite(value) or value < 0 or (above_zero and not value):
        raise LaunchError(f"{option} {value:g}: give a number {'above' if above_zero else 'of at least'} 0")
    return value


def _share(option: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise LaunchError(f"{option} {value:g}: a share is between 0 and 1, as 0.05 for 5 %")
    return value
