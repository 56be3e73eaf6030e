"""Cost of failures for a job of a given size: its MTBF, checkpoint interval and lost hours. No torch.

`at_scale` answers for one number of GPUs, `goodput_against_interval` for one number at several intervals.
Every answer comes with the published band of failure rates, because the rate is what is known least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megalite.planner.cost.checkpoints import (
    Save,
    Storage,
    expected_ettr,
    planned_interval_s,
    time_shares,
    young_interval_s,
)
from megalite.planner.failure_rates import (
    DEFAULT_RATE,
    GPUS_PER_NODE,
    HOURS_PER_DAY,
    PUBLISHED_BAND,
    failure_probability,
    mtbf_hours,
    whole_nodes,
)


@dataclass(frozen=True)
class Reliability:
    """Assumptions about a job of any size."""

    rate_per_1000_node_days: float = DEFAULT_RATE
    parameters: float = 70.6e9
    bytes_per_parameter: float = 12
    gpus_per_node: int = GPUS_PER_NODE
    days: float = 30.0
    storage: Storage = field(default_factory=Storage)
    detection_s: float = 300.0  # from a failure until it is noticed
    restart_s: float = 300.0  # from then until training goes on: processes, loading, warming up
    communication_share: float = 0.0  # of a step that counts, in which GPUs wait for communication
    interval_s: float | None = None  # of training between saves; None: that of `checkpoint.interval: auto`

    @property
    def checkpoint_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter

    @property
    def down_s(self) -> float:
        """Seconds from a failure until training continues."""
        return self.detection_s + self.restart_s


@dataclass(frozen=True)
class JobScale:
    """A job on so many GPUs; the fields are the columns of `megalite plan reliability --csv`.

    High and low rate are the ends of the published failure rates.
    """

    gpus: int
    nodes: int
    mtbf_hours: float
    mtbf_hours_at_high_rate: float
    mtbf_hours_at_low_rate: float
    expected_failures: float  # run time / MTBF: failures also hit restarts
    expected_failures_at_high_rate: float
    expected_failures_at_low_rate: float
    failure_probability_per_day: float  # of at least one
    save_blocked_s: float
    save_duration_s: float
    interval_s: float
    young_interval_s: float  # first order, for comparison
    hours: Mapping[str, float]  # where they go, adding up to those of the run
    goodput: float  # share of the time in steps that count, communication included: ETTR
    goodput_at_high_rate: float  # at the same interval: who sets it does not know the rate
    goodput_at_low_rate: float
    ettr_meta: float  # by the closed form of arXiv:2410.21680


def at_scale(job: Reliability, gpus: int) -> JobScale:
    """Returns the job on `gpus`. Raises ConfigError if they are no whole number of nodes."""
    nodes = whole_nodes(gpus, job.gpus_per_node)
    mtbf_h = mtbf_hours(job.rate_per_1000_node_days, nodes)
    at_low_rate, at_high_rate = (mtbf_hours(rate, nodes) for rate in PUBLISHED_BAND)
    run_hours = job.days * HOURS_PER_DAY
    node_fails_within_a_day = -math.expm1(-HOURS_PER_DAY / mtbf_h / nodes)
    save = job.storage.save(job.checkpoint_bytes, gpus, nodes)
    interval_s = _interval_s(job, save, mtbf_h * 3600)
    shares = time_shares(interval_s, save, mtbf_h * 3600, job.down_s)

    def productive(mtbf_hours: float) -> float:
        return time_shares(interval_s, save, mtbf_hours * 3600, job.down_s).productive

    return JobScale(
        gpus=gpus,
        nodes=nodes,
        mtbf_hours=mtbf_h,
        mtbf_hours_at_high_rate=at_high_rate,
        mtbf_hours_at_low_rate=at_low_rate,
        expected_failures=run_hours / mtbf_h,
        expected_failures_at_high_rate=run_hours / at_high_rate,
        expected_failures_at_low_rate=run_hours / at_low_rate,
        failure_probability_per_day=failure_probability(node_fails_within_a_day, nodes),
        save_blocked_s=save.blocked_s,
        save_duration_s=save.duration_s,
        interval_s=interval_s,
        young_interval_s=young_interval_s(save.blocked_s, mtbf_h * 3600),
        hours={
            "computation": run_hours * shares.productive * (1 - job.communication_share),
            "communication": run_hours * shares.productive * job.communication_share,
            "writes": run_hours * shares.writes,
            "rework": run_hours * shares.rework,
            "restarts": run_hours * shares.restarts,
        },
        goodput=shares.productive,
        goodput_at_high_rate=productive(at_high_rate),
        goodput_at_low_rate=productive(at_low_rate),
        ettr_meta=expected_ettr(interval_s, save, mtbf_h * 3600, job.down_s),
    )


def goodput_against_interval(job: Reliability, gpus: int) -> list[JobScale]:
    """Returns the job at intervals around that of `checkpoint.interval: auto`: from a thirtieth of it to thirty times,
    in equal ratios. The job's own is among them.

    Intervals that are shorter than a save takes are left out: one save at a time is on its way.
    """
    save = job.storage.save(job.checkpoint_bytes, gpus, whole_nodes(gpus, job.gpus_per_node))
    mtbf_s = mtbf_hours(job.rate_per_1000_node_days, whole_nodes(gpus, job.gpus_per_node)) * 3600
    planned_s = _interval_s(replace(job, interval_s=None), save, mtbf_s)
    tried_s = {planned_s * 30.0 ** (number / 30) for number in range(-30, 31)}
    tried_s.add(_interval_s(job, save, mtbf_s))
    shortest_s = save.duration_s if job.storage.background else 0.0
    return [at_scale(replace(job, interval_s=tried), gpus) for tried in sorted(tried_s) if tried >= shortest_s]


def _interval_s(job: Reliability, save: Save, mtbf_s: float) -> float:
    if job.interval_s is not None:
        return max(job.interval_s, save.duration_s if job.storage.background else 0.0)
    return planned_interval_s(save, mtbf_s)
