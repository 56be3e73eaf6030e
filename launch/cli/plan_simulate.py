"""The command `megalite plan simulate`: simulates long runs with failures, hangs, spare nodes, checkpoints and
stragglers. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from launch.cli.options import AsJson, check_one_format, finite_number
from launch.errors import LaunchError
from launch.output import print_csv, progress_bar
from launch.planning.tables.simulation import Simulated
from megalite.config import ConfigError
from megalite.planner.reliability.checkpoints import Save, best_interval_s
from megalite.planner.reliability.failure_rates import DEFAULT_RATE, PUBLISHED_BAND, nodes_of
from megalite.planner.reliability.run_simulation import DAY_S, SimulatedJob, simulate, summarise

LONG = 200_000  # failures, which take about 2 seconds to simulate: from here on progress is shown
MOST_FAILURES = 3_000_000  # of all runs together: half a minute and a gigabyte
MOST_SEEDS = 10_000
LEAST_INTERVAL_S = 0.06  # shorter than any step
REPAIR_HOURS = 24.0


def simulate_runs(
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the job, which stops when any of them fails.")] = 1024,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node; a failure stops the whole node.")] = 8,
    days: Annotated[float, typer.Option(help="Length of the run in days of wall-clock time.")] = 30.0,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate-per-1000-node-days",
            help=f"Failure rate; default {DEFAULT_RATE:.0f}, beside 2 and 14, the extremes of published rates.",
        ),
    ] = None,
    save_seconds: Annotated[
        float, typer.Option(help="Seconds from the start of a checkpoint until it is usable.")
    ] = 60.0,
    blocked_seconds: Annotated[
        float | None, typer.Option(help="Seconds of each save during which training waits; default: the whole save.")
    ] = None,
    interval: Annotated[
        str, typer.Option(help="Minutes of training between checkpoints; auto: the optimum (Daly 2006).")
    ] = "auto",
    detection_minutes: Annotated[float, typer.Option(help="Minutes until a crash is detected.")] = 5.0,
    hang_share: Annotated[
        float, typer.Option(help="Share of failures, 0 to 1, that are hangs, which only a timeout detects.")
    ] = 0.0,
    hang_timeout_minutes: Annotated[float, typer.Option(help="Minutes until a hang is detected.")] = 30.0,
    restart_minutes: Annotated[
        float, typer.Option(help="Minutes from available nodes until training continues.")
    ] = 5.0,
    spare_nodes: Annotated[
        int | None,
        typer.Option(min=0, help="Spare nodes; the job waits for a repair when none is left. Default: unlimited."),
    ] = None,
    repair_hours: Annotated[
        float | None, typer.Option(help="Hours until a failed node is available again, with --spare-nodes; default 24.")
    ] = None,
    lost_node_share: Annotated[
        float, typer.Option(help="Share of failures, 0 to 1, that take the node out; others restart on the same nodes.")
    ] = 1.0,
    infant_mortality_shape: Annotated[
        float, typer.Option(help="Weibull shape; below 1, failures come early. Does not change their expected number.")
    ] = 1.0,
    slow_node_share: Annotated[float, typer.Option(help="Share of nodes, 0 to 1, that are always slower.")] = 0.0,
    slow_node_slowdown: Annotated[float, typer.Option(help="Share of a step by which slow nodes are slower.")] = 0.1,
    step_jitter: Annotated[
        float, typer.Option(help="Standard deviation of each node's step time, as a share of it.")
    ] = 0.0,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SEEDS, help="Number of runs, which differ only in their random numbers.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first run; the same seed repeats the run.")] = 0,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a line per run as CSV.")] = False,
) -> None:
    """Simulate long runs failure by failure: how their hours are spent, and how much that varies.

    Every step waits for the slowest node. Simulating 90 days takes a few seconds for any number of GPUs.

    Example: `megalite plan simulate --gpus 16384 --days 54 --rate-per-1000-node-days 3.8 --spare-nodes 16`
    """
    from launch.planning.tables import simulation as tables

    check_one_format(as_json=as_json, as_csv=as_csv)
    save = _save(save_seconds, blocked_seconds)
    if repair_hours is not None and spare_nodes is None:
        raise LaunchError(f"--repair-hours {repair_hours:g} is for a number of spare nodes: add --spare-nodes")
    try:
        nodes = nodes_of(gpus, gpus_per_node)
    except ConfigError as error:
        raise LaunchError(f"--gpus {gpus}: {error}") from None
    here = DEFAULT_RATE if rate is None else finite_number("--rate-per-1000-node-days", rate, zero=True)
    run = SimulatedJob(
        nodes=nodes,
        duration_s=DAY_S * finite_number("--days", days),
        interval_s=_interval_s(interval, save, nodes, here),
        save=save,
        rate_per_1000_node_days=here,
        detection_s=60 * finite_number("--detection-minutes", detection_minutes, zero=True),
        hang_share=_share("--hang-share", hang_share),
        hang_timeout_s=60 * finite_number("--hang-timeout-minutes", hang_timeout_minutes, zero=True),
        restart_s=60 * finite_number("--restart-minutes", restart_minutes, zero=True),
        lost_node_share=_share("--lost-node-share", lost_node_share),
        spare_nodes=spare_nodes,
        repair_s=3600
        * finite_number("--repair-hours", REPAIR_HOURS if repair_hours is None else repair_hours, zero=True),
        infant_mortality_shape=finite_number("--infant-mortality-shape", infant_mortality_shape),
        slow_node_share=_share("--slow-node-share", slow_node_share),
        slow_node_slowdown=finite_number("--slow-node-slowdown", slow_node_slowdown, zero=True),
        step_jitter=finite_number("--step-jitter", step_jitter, zero=True),
    )
    # one interval for all rates: whoever chooses it does not know the rate
    rates = (here,) if rate is not None else (here, *PUBLISHED_BAND)
    runs = [replace(run, rate_per_1000_node_days=each) for each in rates]
    simulated = _simulate(runs, range(seed, seed + seeds))
    if as_json:
        tables.show_json(simulated, gpus)
    elif as_csv:
        print_csv(tables.rows(simulated, gpus))
    else:
        tables.show(simulated, gpus)


def _simulate(runs: Sequence[SimulatedJob], seeds: range) -> list[Simulated]:
    failures = sum(run.expected_failures for run in runs) * len(seeds)
    if failures > MOST_FAILURES:
        raise LaunchError(
            f"--seeds {len(seeds)}: {failures:,.0f} failures are expected in all runs, {MOST_FAILURES:,} simulated at "
            f"most: take up to {max(1, int(MOST_FAILURES / failures * len(seeds)))} seeds or fewer days"
        )
    simulated = []
    with progress_bar(is_shown=failures >= LONG) as report_progress:
        for number, run in enumerate(runs):
            outcomes = []
            for seed in seeds:
                outcomes.append(simulate(run, seed))
                report_progress("simulating", number * len(seeds) + len(outcomes), len(runs) * len(seeds))
            simulated.append(Simulated(run, tuple(outcomes), summarise(outcomes)))
    return simulated


def _save(seconds: float, blocked: float | None) -> Save:
    save_s = finite_number("--save-seconds", seconds, zero=True)
    blocked_s = save_s if blocked is None else finite_number("--blocked-seconds", blocked, zero=True)
    if blocked_s > save_s:
        raise LaunchError(
            f"--blocked-seconds {blocked_s:g} is more than --save-seconds {save_s:g}, of which it is a part: give at "
            f"most {save_s:g}"
        )
    return Save(blocked_s, save_s)


def _interval_s(text: str, save: Save, nodes: int, rate: float) -> float:
    """Seconds between checkpoints from --interval: minutes, or `auto`. Raises LaunchError."""
    if text == "auto":
        if not rate:
            raise LaunchError("--interval auto is for runs that fail: with a rate of 0 give minutes, such as 60")
        if not save.blocked_s and not save.duration_s:
            raise LaunchError("--interval auto balances the cost of checkpoints: if they cost nothing, give minutes")
        interval_s = best_interval_s(save.blocked_s, DAY_S * 1000 / (nodes * rate), save.duration_s)
    else:
        try:
            minutes = float(text)
        except ValueError:
            raise LaunchError(f"--interval {text}: give minutes, such as 30, or auto") from None
        interval_s = 60 * finite_number("--interval", minutes)
    if interval_s < LEAST_INTERVAL_S:
        raise LaunchError(
            f"--interval {text}: {interval_s:.3g} s between checkpoints are less than a step takes: give "
            f"{LEAST_INTERVAL_S / 60:g} minutes or more"
        )
    if save.blocked_s + interval_s / 2 <= save.blocked_s:
        raise LaunchError(f"--blocked-seconds {save.blocked_s:g}: they leave no time for training: give fewer")
    return interval_s


def _share(option: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise LaunchError(f"{option} {value:g}: a share is between 0 and 1, as 0.05 for 5 %")
    return value
