"""The forecast of a run: its length, its checkpoints, and the time that saves and failures take. No torch.

`megalite plan`, its page, `plan reliability` and `plan simulate` all ask here, so that one config on one cluster gets
one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.config import Config
from megalite.planner.cost.checkpoints import Storage, megalite_bytes_per_parameter
from megalite.planner.cost.stage_parameters import parameters
from megalite.planner.failure_rates import DEFAULT_RATE, rate_of_mtbf
from megalite.planner.reliability.goodput_model import JobScale, Reliability, at_scale
from megalite.planner.run_length import DAY_S, RunLength, run_length
from megalite.planner.workload import TrainingWorkload


@dataclass(frozen=True)
class RunForecast:
    """The length of a run, and what failures and saves cost it."""

    assumed: Reliability
    scale: JobScale  # on all accelerators of the run's nodes
    length: RunLength

    def length_at(self, goodput: float) -> RunLength:
        """Returns the length at another goodput, such as that of the highest published failure rate."""
        return replace(self.length, goodput=goodput)


def forecast_of(config: Config, job: TrainingWorkload, step_s: float, per_node: int) -> RunForecast:
    """Returns the forecast of the run of `config` as `job`, a step of which takes `step_s`, on nodes of `per_node`.

    The job has the layout, and a global batch of its own where replicas were added.
    """
    accelerators = job.layout.world_size
    nodes = -(-accelerators // per_node)  # a node fails as a whole
    length = run_length(config, step_s, accelerators, global_batch_size=job.global_batch_size)
    assumed = replace(reliability_of(config, per_node, nodes * per_node), interval_s=stated_interval_s(config, length))
    length = replace(length, goodput=at_scale(assumed, nodes * per_node).goodput)
    assumed = replace(assumed, days=length.days if length.ends else length.training_s / DAY_S)
    return RunForecast(assumed, at_scale(assumed, nodes * per_node), length)


def reliability_of(config: Config, per_node: int, accelerators: int | None = None) -> Reliability:
    """Returns what a config says about failures and checkpoints; its interval is that of `checkpoint.interval: auto`.

    `checkpoint.mean_hours_between_failures` is of a job of one size: it counts if `accelerators` is given.
    """
    hours, rate = config.checkpoint.mean_hours_between_failures, DEFAULT_RATE
    if hours is not None and accelerators is not None:
        rate = rate_of_mtbf(hours, accelerators, per_node)
    return Reliability(
        rate_per_1000_node_days=rate,
        parameters=parameters(config.model),
        bytes_per_parameter=megalite_bytes_per_parameter(config.optimizer.name, config.model),
        gpus_per_node=per_node,
        storage=Storage(background=config.checkpoint.background),
    )


def stated_interval_s(config: Config, length: RunLength) -> float | None:
    """Returns the seconds of training between saves that `checkpoint.interval` states; None where it is `auto`.

    With 0 they are those of the whole run, which then saves only at its end.
    """
    interval = config.checkpoint.interval
    if interval == "auto":
        return None
    return min(interval or length.steps, length.steps) * length.step_s
