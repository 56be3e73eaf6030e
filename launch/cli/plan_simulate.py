"""The command `megalite plan simulate`: simulates long runs with failures, hangs, spare nodes, checkpoints and
stragglers. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from launch.cli.options import (
    AsJson,
    Overrides,
    PricePerAcceleratorHour,
    check_one_format,
    checked_price,
    finite_number,
)
from launch.errors import LaunchError
from launch.output import print_csv, progress_bar
from launch.planning.prediction_by_size import PlannedRun, planned_run
from launch.planning.tables.simulation import Simulated
from launch.trainer.run_config import load_run_config
from megalite.config import ConfigError
from megalite.planner.reliability.checkpoints import Save, planned_interval_s
from megalite.planner.reliability.failure_rates import DEFAULT_RATE, PUBLISHED_BAND, nodes_of
from megalite.planner.reliability.run_simulation import DAY_S, SimulatedJob, simulate, summarise

LONG = 200_000  # failures, which take about 2 seconds to simulate: from here on progress is shown
MOST_FAILURES = 3_000_000  # of all runs together: half a minute and a gigabyte
MOST_SEEDS = 10_000
LEAST_INTERVAL_S = 0.06  # shorter than any step
REPAIR_HOURS = 24.0
DEFAULT_DAYS, DEFAULT_SAVE_S = 30.0, 60.0


def simulate_runs(
    config_path: Annotated[
        Path | None,
        typer.Argument(
            help="Config from which to take the checkpoints and the length of the run.", metavar="[CONFIG.yaml]"
        ),
    ] = None,
    overrides: Overrides = None,
    *,
    accelerator: Annotated[
        str | None, typer.Option(help="GPU on which to predict the steps of CONFIG, such as H100.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the job, which stops when any of them fails.")] = 1024,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node; a failure stops the whole node.")] = 8,
    days: Annotated[
        float | None,
        typer.Option(
            help="Length of the run in days of wall-clock time; default: that of CONFIG on --accelerator, or 30."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate-per-1000-node-days",
            help=f"Failure rate; default {DEFAULT_RATE:.0f}, beside 2 and 14, the extremes of published rates.",
        ),
    ] = None,
    save_seconds: Annotated[
        float | None,
        typer.Option(help="Seconds from the start of a checkpoint until it is usable; default: by CONFIG, or 60."),
    ] = None,
    blocked_seconds: Annotated[
        float | None,
        typer.Option(help="Seconds of each save during which training waits; default: by CONFIG, or the whole save."),
    ] = None,
    interval: Annotated[
        str | None,
        typer.Option(
            help="Minutes of training between checkpoints, or auto, which is that of `checkpoint.interval: auto`; "
            "default: as in CONFIG, or auto."
        ),
    ] = None,
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
    price: PricePerAcceleratorHour = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a line per run as CSV.")] = False,
) -> None:
    """Simulate long runs failure by failure: how their hours are spent, and how much that varies.

    CONFIG says how large checkpoints are, whether they block and how often they come, as in `megalite plan`. Every step
    waits for the slowest node. Simulating 90 days takes a few seconds for any number of GPUs.

    Example: `megalite plan simulate --gpus 16384 --days 54 --rate-per-1000-node-days 3.8 --spare-nodes 16`
    """
    from launch.planning.tables import simulation as tables

    check_one_format(as_json=as_json, as_csv=as_csv)
    price = checked_price(price)
    if repair_hours is not None and spare_nodes is None:
        raise LaunchError(f"--repair-hours {repair_hours:g} is for a number of spare nodes: add --spare-nodes")
    try:
        nodes = nodes_of(gpus, gpus_per_node)
    except ConfigError as error:
        raise LaunchError(f"--gpus {gpus}: {error}") from None
    detection_s = 60 * finite_number("--detection-minutes", detection_minutes, zero=True)
    restart_s = 60 * finite_number("--restart-minutes", restart_minutes, zero=True)
    config = None if config_path is None else load_run_config(config_path, overrides or [])
    if config is None and accelerator is not None:
        raise LaunchError(f"--accelerator {accelerator} predicts the steps of a CONFIG.yaml: give one")
    here = None if rate is None else finite_number("--rate-per-1000-node-days", rate, zero=True)
    planned = None
    if config is not None:
        planned = planned_run(config, accelerator, gpus, gpus_per_node, here, (detection_s, restart_s), days is None)
    if here is None:
        here = DEFAULT_RATE if planned is None else planned.job.rate_per_1000_node_days
    save = _save(save_seconds, blocked_seconds, None if planned is None else planned.save)
    if interval is None and planned is not None and (save == planned.save or not planned.is_auto):
        interval_s = planned.run.scale.interval_s
    else:
        interval_s = _interval_s(interval or "auto", save, nodes, here)
    if days is None:
        days = DEFAULT_DAYS if planned is None else planned.run.days
    run = SimulatedJob(
        nodes=nodes,
        duration_s=DAY_S * finite_number("--days", days),
        interval_s=interval_s,
        save=save,
        rate_per_1000_node_days=here,
        detection_s=detection_s,
        hang_share=_share("--hang-share", hang_share),
        hang_timeout_s=60 * finite_number("--hang-timeout-minutes", hang_timeout_minutes, zero=True),
        restart_s=restart_s,
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
        tables.show_json(simulated, gpus, price, _remarks(planned, config_path, save_seconds))
    elif as_csv:
        print_csv(tables.rows(simulated, gpus))
    else:
        tables.show(simulated, gpus, price, _remarks(planned, config_path, save_seconds))


def _remarks(planned: PlannedRun | None, config_path: Path | None, save_seconds: float | None) -> list[str]:
    """Sentences about the source of the checkpoints and of the length."""
    if planned is None:
        assumed = ["a save of 60 s, for which training waits, is assumed: name a CONFIG.yaml to take its checkpoints"]
        return assumed if save_seconds is None else []
    length = planned.run.length
    return [
        *([] if length is None else [f"{config_path} as {planned.run.layout}: {length}"]),
        *planned.remarks,
    ]


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


def _save(seconds: float | None, blocked: float | None, planned: Save | None) -> Save:
    """The times of a save, as given, or of a config's checkpoints where they are `planned`."""
    if planned is not None and seconds is None:
        save_s, blocked_s = planned.duration_s, planned.blocked_s
    else:
        save_s = DEFAULT_SAVE_S if seconds is None else finite_number("--save-seconds", seconds, zero=True)
        blocked_s = save_s
    if blocked is not None:
        blocked_s = finite_number("--blocked-seconds", blocked, zero=True)
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
        interval_s = planned_interval_s(save, DAY_S * 1000 / (nodes * rate))
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
