"""The predicted step and the run of one config on several numbers of GPUs. No torch here.

Where the layout is `auto`, the best one is chosen for each number, as `megalite plan` does. A stated layout keeps its
tensor and pipeline sizes, and only the replicas change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.errors import LaunchError
from launch.output import progress_lines
from launch.prediction.cluster import cluster_of_nodes
from megalite.config import Config, resolve_layout
from megalite.config.suggestions import multiples_near
from megalite.planner.cost.checkpoints import Save
from megalite.planner.cost.stage_parameters import parameters
from megalite.planner.cost.step_time import StepTime, step_time
from megalite.planner.explanation import why_nothing_fits
from megalite.planner.failure_rates import HOURS_PER_DAY
from megalite.planner.forecast import reliability_of, stated_interval_s
from megalite.planner.reliability.goodput_model import JobScale, Reliability, at_scale
from megalite.planner.run_length import RunLength, run_length
from megalite.planner.search import search
from megalite.planner.workload import TrainingWorkload
from megalite.units import duration

HARDLY_EVER = 1e-9  # failures per 1,000 node-days, for a rate of 0, which has no mean time between failures
TRIED, MOST_COUNTED = 5, 100_000  # numbers of GPUs, and the largest
# of `StepTime.parts`
COMMUNICATION = ("tensor collectives", "context collectives", "expert collectives", "between stages", "replicas")


class NothingFits(LaunchError):
    """A config cannot run on a number of GPUs, though it may on others."""


@dataclass(frozen=True)
class SizedRun:
    """A job on a number of GPUs, and the length of its run."""

    scale: JobScale
    days: float  # of wall time
    length: RunLength | None = None  # of a config; None: `days` are given
    layout: str = ""  # for which the step of `length` is predicted

    @property
    def accelerator_hours(self) -> float:
        return self.days * HOURS_PER_DAY * self.scale.gpus


@dataclass(frozen=True)
class PlannedRun:
    """The run of a config on one number of GPUs."""

    job: Reliability
    run: SizedRun
    is_auto: bool  # the interval is that of `checkpoint.interval: auto`
    remarks: tuple[str, ...]  # about options that are not counted

    @property
    def save(self) -> Save:
        return Save(self.run.scale.save_blocked_s, self.run.scale.save_duration_s)


def planned_run(
    config: Config,
    accelerator: str | None,
    gpus: int,
    gpus_per_node: int,
    rate_per_1000_node_days: float | None,
    down_s: tuple[float, float],
    is_length_wanted: bool,
) -> PlannedRun:
    """Returns the run of a config; its length and its own interval are known where its `accelerator` is.

    A failure rate that is not given is that of the config. `down_s`: seconds to detect a failure, and to restart.
    Raises LaunchError or ConfigError where the config cannot run.
    """
    job = reliability_of(config, gpus_per_node, gpus)
    job = replace(job, detection_s=down_s[0], restart_s=down_s[1])
    if rate_per_1000_node_days is not None:
        job = replace(job, rate_per_1000_node_days=rate_per_1000_node_days or HARDLY_EVER)
    if accelerator is None:
        return PlannedRun(job, SizedRun(at_scale(job, gpus), job.days), True, tuple(steps_not_counted(config)))
    (run,), _ = predicted_runs(config, accelerator, [gpus], job, is_length_wanted=is_length_wanted)
    return PlannedRun(job, run, config.checkpoint.interval == "auto", ())


def steps_not_counted(config: Config) -> list[str]:
    """Returns a sentence if `checkpoint.interval` is in steps, for answers in which their time is not known."""
    if config.checkpoint.interval == "auto":
        return []
    return [
        f"checkpoint.interval {config.checkpoint.interval} is not counted, because it is in steps, and how long they "
        "take is predicted with --accelerator: the interval here is that of auto"
    ]


def predicted_runs(
    config: Config, accelerator: str, counts: Sequence[int], job: Reliability, *, is_length_wanted: bool
) -> tuple[list[SizedRun], list[str]]:
    """Returns the run of a config on each number of GPUs, and a sentence about each number on which no layout fits.

    The days are those of `job` where the length is not wanted. Raises LaunchError or ConfigError where the config can
    run on none of the numbers.
    """
    runs, problems = [], []
    with progress_lines("judging layouts", every_s=1.0) as describe:
        for count in counts:
            describe(f"judging layouts on {count:,} x {accelerator}")
            try:
                runs.append(_predicted_run(config, accelerator, count, job, is_length_wanted))
            except NothingFits as error:
                problems.append(f"left out: {count:,} GPUs: {error}")
                last = error
    if not runs:
        raise last
    return runs, problems


def counts_by(config: Config, accelerator: str, gpus_per_node: int, seconds: float) -> list[int]:
    """Returns numbers of GPUs of which the least could finish the run in so many seconds if they did nothing but its
    products at their usual speed, and the largest has three times as many."""
    one = cluster_of_nodes(accelerator, 1, gpus_per_node, "as counted")
    flops = 6.0 * parameters(config.model) * config.batches.tokens_after(config.total_steps)
    if (experts := config.model.num_experts) is not None:
        flops *= config.model.num_experts_per_tok / experts  # nearly all weights are the experts'
    least = flops / seconds / (one.peak_flops(config.precision.dtype) * one.accelerator.efficiency) / gpus_per_node
    nodes = sorted({*(2**n for n in range(18)), *(3 * 2**n for n in range(17))})
    counts = [count * gpus_per_node for count in nodes if least <= count and count * gpus_per_node <= MOST_COUNTED]
    if not counts:
        raise LaunchError(f"no number of {accelerator} up to {MOST_COUNTED:,} ends the run by then")
    return counts[:TRIED]


def _predicted_run(config: Config, accelerator: str, gpus: int, job: Reliability, is_length_wanted: bool) -> SizedRun:
    workload, time = step_on(config, accelerator, gpus, job.gpus_per_node)
    length = run_length(config, time.seconds, gpus, global_batch_size=workload.global_batch_size)
    interval_s = stated_interval_s(config, length) if job.interval_s is None else job.interval_s
    sized = replace(job, communication_share=communication_share(time), interval_s=interval_s)
    scale = at_scale(sized, gpus)
    if not is_length_wanted:
        return SizedRun(scale, job.days)
    length = replace(length, goodput=scale.goodput)
    if not length.ends:
        raise NothingFits(
            f"on {gpus:,} GPUs the run is never done: they fail every {duration(scale.mtbf_hours * 3600)}, and a "
            f"checkpoint comes every {duration(scale.interval_s)} of training: save more often, or give --days"
        )
    return SizedRun(at_scale(replace(sized, days=length.days), gpus), length.days, length, str(workload.layout))


def communication_share(time: StepTime) -> float:
    """Returns the share of a step in which GPUs wait for communication."""
    return sum(time.parts[part] for part in COMMUNICATION) / time.seconds


def step_on(config: Config, accelerator: str, gpus: int, gpus_per_node: int) -> tuple[TrainingWorkload, StepTime]:
    """Predicts a step on so many GPUs.

    In a stated layout each replica keeps the samples that the config gives it; where `parallel.data_parallel_size` is
    auto, the replicas share `training.global_batch_size`. Raises LaunchError or ConfigError where the config cannot run
    on that number, and `NothingFits` where the layout is `auto` and none fits.
    """
    cluster = cluster_of_nodes(accelerator, gpus // gpus_per_node, gpus_per_node, "as counted")
    if config.unresolved_options:
        result = search(config, cluster, free=config.unresolved_options)
        if result.best is None:
            raise NothingFits(why_nothing_fits(config, result, config.unresolved_options))
        return result.best.job, result.best.time
    job = job_on(config, gpus)
    return job, step_time(job, cluster)


def job_on(config: Config, gpus: int) -> TrainingWorkload:
    """Returns the workload of a stated layout on so many GPUs. Raises LaunchError if they are no whole replicas."""
    parallel = config.parallel
    if parallel.data_parallel_size == "auto":
        return TrainingWorkload.of(config, resolve_layout(config, gpus, "cuda"))
    replica = parallel.ranks_per_replica
    there = parallel.data_parallel_size
    job = TrainingWorkload.of(config, resolve_layout(config, replica * there, "cuda"))
    if gpus % replica:
        raise LaunchError(
            f"--gpus {gpus}: a replica of the model takes {replica} GPUs (tensor x pipeline x context): use "
            f"{multiples_near(gpus, replica)}"
        )
    replicas = gpus // replica
    return replace(
        job,
        layout=replace(job.layout, data_parallel_size=replicas),
        global_batch_size=job.global_batch_size // there * replicas,
    )
