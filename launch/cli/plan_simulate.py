"""The command `megalite plan simulate`: long runs with failures, spare nodes, checkpoints and stragglers. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from typer import Option

from launch.cli.options import finite_number, taking
from launch.cli.plan_job_options import DEFAULT_DAYS, JobOptions
from launch.errors import LaunchError
from launch.output import print_csv, print_json, progress_bar
from launch.planning.prediction_by_size import PlannedRun, planned_run
from launch.planning.tables.simulation import Simulated
from megalite.config import Config, ConfigError
from megalite.planner.cost.checkpoints import Save, planned_interval_s
from megalite.planner.failure_rates import DEFAULT_RATE, PUBLISHED_BAND, whole_nodes
from megalite.planner.reliability.run_simulation import DAY_S, SimulatedJob, simulate, summarise

LONG = 200_000  # failures, which take about 2 seconds to simulate: from here on progress is shown
MOST_FAILURES = 3_000_000  # of all runs together: half a minute and a gigabyte
MOST_SEEDS = 10_000
LEAST_INTERVAL_S = 0.06  # shorter than any step
REPAIR_HOURS = 24.0
DEFAULT_SAVE_S = 60.0


class SimulateOptions(JobOptions):
    """The GPUs of the job, checkpoints, what failures cost, stragglers, and seeds."""

    gpus: int = Option(1024, min=1, help="GPUs of the job, which stops when any of them fails.")
    save_seconds: float | None = Option(
        None, help="Seconds from the start of a checkpoint until it is usable; default: by CONFIG, or 60."
    )
    blocked_seconds: float | None = Option(
        None, help="Seconds of each save during which training waits; default: by CONFIG, or the whole save."
    )
    interval: str | None = Option(
        None,
        help="Minutes of training between checkpoints, or auto, which is that of `checkpoint.interval: auto`; "
        "default: as in CONFIG, or auto.",
    )
    hang_share: float = Option(0.0, help="Share of failures, 0 to 1, that are hangs, which only a timeout detects.")
    hang_timeout_minutes: float = Option(30.0, help="Minutes until a hang is detected.")
    spare_nodes: int | None = Option(
        None, min=0, help="Spare nodes; the job waits for a repair when none is left. Default: unlimited."
    )
    repair_hours: float | None = Option(
        None, help="Hours until a failed node is available again, with --spare-nodes; default 24."
    )
    lost_node_share: float = Option(
        1.0, help="Share of failures, 0 to 1, that take the node out; others restart on the same nodes."
    )
    infant_mortality_shape: float = Option(
        1.0, help="Weibull shape; below 1, failures come early. Does not change their expected number."
    )
    slow_node_share: float = Option(0.0, help="Share of nodes, 0 to 1, that are always slower.")
    slow_node_slowdown: float = Option(0.1, help="Share of a step by which slow nodes are slower.")
    step_jitter: float = Option(0.0, help="Standard deviation of each node's step time, as a share of it.")
    seeds: int = Option(10, min=1, max=MOST_SEEDS, help="Number of runs, which differ only in their random numbers.")
    seed: int = Option(0, min=0, help="Seed of the first run; the same seed repeats the run.")


@taking(SimulateOptions)
def simulate_runs(options: SimulateOptions) -> None:
    """Simulate long runs failure by failure: how their hours are spent, and how much that varies.

    CONFIG says how large checkpoints are, whether they block and how often they come, as in `megalite plan`. Every step
    waits for the slowest node. Simulating 90 days takes a few seconds for any number of GPUs.

    Example: `megalite plan simulate --gpus 16384 --days 54 --rate-per-1000-node-days 3.8 --spare-nodes 16`
    """
    from launch.planning.tables import simulation as tables

    run, remarks = _job(options, options.checked_config())
    # one interval for all rates: whoever chooses it does not know the rate
    rate, gpus, price = run.rate_per_1000_node_days, options.gpus, options.price_per_accelerator_hour
    rates = (rate,) if options.rate_per_1000_node_days is not None else (rate, *PUBLISHED_BAND)
    runs = [replace(run, rate_per_1000_node_days=each) for each in rates]
    simulated = _simulate(runs, range(options.seed, options.seed + options.seeds))
    if options.as_json:
        print_json(tables.as_values(simulated, gpus, price, remarks))
    elif options.as_csv:
        print_csv(tables.rows(simulated, gpus))
    else:
        tables.show(simulated, gpus, price, remarks)


def _job(options: SimulateOptions, config: Config | None) -> tuple[SimulatedJob, list[str]]:
    """The job to simulate, and sentences about the source of its figures. Raises LaunchError or ConfigError."""
    gpus, per_node, accelerator = options.gpus, options.gpus_per_node, options.accelerator
    options.check_numbers(
        above_0="infant_mortality_shape",
        from_0="rate_per_1000_node_days save_seconds blocked_seconds hang_timeout_minutes repair_hours "
        "slow_node_slowdown step_jitter",
    )
    for name in ("hang_share", "lost_node_share", "slow_node_share"):
        if not 0 <= (value := getattr(options, name)) <= 1:
            raise LaunchError(f"--{name.replace('_', '-')} {value:g}: a share is between 0 and 1, as 0.05 for 5 %")
    if options.repair_hours is not None and options.spare_nodes is None:
        raise LaunchError(f"--repair-hours {options.repair_hours:g} is for a number of spare nodes: add --spare-nodes")
    try:
        nodes = whole_nodes(gpus, per_node)
    except ConfigError as error:
        raise LaunchError(f"--gpus {gpus}: {error}") from None
    if config is None and accelerator is not None:
        raise LaunchError(f"--accelerator {accelerator} predicts the steps of a CONFIG.yaml: give one")
    down_s = (60 * options.detection_minutes, 60 * options.restart_minutes)
    rate, days, planned = options.rate_per_1000_node_days, options.days, None
    if config is not None:
        planned = planned_run(config, accelerator, gpus, per_node, rate, down_s, days is None)
    if rate is None:
        rate = DEFAULT_RATE if planned is None else planned.job.rate_per_1000_node_days
    save = _save(options, None if planned is None else planned.save)
    if options.interval is None and planned is not None and (save == planned.save or not planned.is_auto):
        interval_s = planned.run.scale.interval_s
    else:
        interval_s = _interval_s(options.interval or "auto", save, nodes, rate)
    if days is None:
        days = DEFAULT_DAYS if planned is None else planned.run.days
    # what options and the job call by the same name
    same = {one.name: getattr(options, one.name) for one in fields(SimulatedJob) if hasattr(options, one.name)}
    run = SimulatedJob(
        **same | {"rate_per_1000_node_days": rate},
        nodes=nodes,
        duration_s=DAY_S * days,
        interval_s=interval_s,
        save=save,
        detection_s=down_s[0],
        hang_timeout_s=60 * options.hang_timeout_minutes,
        restart_s=down_s[1],
        repair_s=3600 * (REPAIR_HOURS if options.repair_hours is None else options.repair_hours),
    )
    return run, _remarks(options, planned)


def _remarks(options: SimulateOptions, planned: PlannedRun | None) -> list[str]:
    """Sentences about the source of the checkpoints and of the length."""
    if planned is None:
        assumed = ["a save of 60 s, for which training waits, is assumed: name a CONFIG.yaml to take its checkpoints"]
        return assumed if options.save_seconds is None else []
    length = planned.run.length
    about_length = [] if length is None else [f"{options.config_path} as {planned.run.layout}: {length}"]
    return [*about_length, *planned.remarks]


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


def _save(options: SimulateOptions, planned: Save | None) -> Save:
    """The times of a save, as given, or of a config's checkpoints where they are `planned`."""
    save_s, blocked_s = DEFAULT_SAVE_S, DEFAULT_SAVE_S
    if options.save_seconds is not None:
        save_s = blocked_s = options.save_seconds
    elif planned is not None:
        save_s, blocked_s = planned.duration_s, planned.blocked_s
    if options.blocked_seconds is not None:
        blocked_s = options.blocked_seconds
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
