"""Checkpoint interval and useful time of a job with random failures: closed forms. Pure arithmetic, no torch.

Failures are a Poisson process with a mean time between failures (MTBF) M. All durations are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOO_LONG = 700.0  # exp of more is no float: nothing is ever finished


def young_interval_s(save_cost_s: float, mean_time_between_failures_s: float) -> float:
    """Returns the seconds of training between two saves, to first order: sqrt(2 x cost x MTBF).

    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (9), 1974.
    Too long where a save is not short against the MTBF: `best_interval_s`.
    """
    return math.sqrt(2 * save_cost_s * mean_time_between_failures_s)


def best_interval_s(save_cost_s: float, mean_time_between_failures_s: float, save_duration_s: float = 0.0) -> float:
    """Returns the seconds of training between two saves that lose least time.

    The higher-order estimate of J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
    dumps, Future Generation Computer Systems 22, 2006, eq. 37, which stays near the optimum where a save is not short
    against the MTBF. `save_cost_s` is how long training stands still for one save; what is written in the background
    takes `save_duration_s` in all, which no interval falls below: one save at a time is in flight.
    """
    if mean_time_between_failures_s <= 0 or save_cost_s < 0 or save_duration_s < 0:
        raise ValueError(f"{save_cost_s}, {mean_time_between_failures_s}, {save_duration_s}")
    ratio = save_cost_s / (2 * mean_time_between_failures_s)
    if ratio >= 1:
        return max(mean_time_between_failures_s, save_duration_s)
    first_order = young_interval_s(save_cost_s, mean_time_between_failures_s)
    return max(first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_cost_s, save_duration_s)


@dataclass(frozen=True)
class Save:
    """Times of one checkpoint."""

    blocked_s: float  # training stands still
    duration_s: float  # until it is complete; longer than `blocked_s` where it is written in the background

    def __post_init__(self) -> None:
        if not 0 <= self.blocked_s <= self.duration_s:
            raise ValueError(f"a save that takes {self.duration_s} s cannot block training for {self.blocked_s} s")


@dataclass(frozen=True)
class TimeShares:
    """Shares of all wall time, adding up to one."""

    productive: float  # steps that count
    writes: float  # training stands still for a save that counts
    rework: float  # work, and the saves within it, that a failure threw away
    restarts: float  # nobody has noticed yet, or the job is starting again


def time_shares(interval_s: float, save: Save, mean_time_between_failures_s: float, restart_s: float) -> TimeShares:
    """Returns the shares of a long job that saves every `interval_s` of training and takes `restart_s` from a failure
    to training again.

    Daly 2006's complete cost model: with an interval tau, a save of delta, and R to restart, a segment of tau + delta
    takes M e^(R/M) (e^((tau+delta)/M) - 1) of wall time, because failures may also hit the restart. Here it is taken
    apart, and a save that goes on for b in the background adds the factor e^(b/M): a failure within b of a save's end
    goes back to the save before it.
    """
    mtbf_s = mean_time_between_failures_s
    segment, behind = (interval_s + save.blocked_s) / mtbf_s, (save.duration_s - save.blocked_s) / mtbf_s
    restarts = -math.expm1(-restart_s / mtbf_s)
    if segment + behind > TOO_LONG or segment <= 0:
        return TimeShares(0.0, 0.0, 1.0 - restarts, restarts)
    # e^x - 1 >= x: saves and what counts never exceed the time outside restarts
    segments_per_mtbf = math.exp(-behind) / math.expm1(segment) * (1.0 - restarts)
    productive = segments_per_mtbf * interval_s / mtbf_s
    writes = segments_per_mtbf * save.blocked_s / mtbf_s
    return TimeShares(productive, writes, max(0.0, 1.0 - restarts - productive - writes), restarts)


def first_order_shares(
    interval_s: float, save: Save, mean_time_between_failures_s: float, restart_s: float
) -> TimeShares:
    """Returns the sum that Young 1974 minimizes: delta/tau + tau/2M, and R/M for restarts; good while it is small.

    Failures hit in the middle of an interval, and neither saves nor restarts.
    """
    mtbf_s = mean_time_between_failures_s
    writes, restarts = save.blocked_s / interval_s, restart_s / mtbf_s
    rework = (interval_s / 2 + save.duration_s - save.blocked_s) / mtbf_s
    return TimeShares(max(0.0, 1.0 - writes - rework - restarts), writes, rework, restarts)


def expected_ettr(interval_s: float, save: Save, mean_time_between_failures_s: float, restart_s: float) -> float:
    """Returns the effective training time ratio, E[ETTR] = (1 - N r (u0 + dt/2)) / (1 + w/dt), where N r = 1/MTBF.

    Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025
    (arXiv:2410.21680): N nodes fail at rate r each, u0 is the restart, dt the interval, w the save. Its authors find it
    within about 5 % of their Monte Carlo simulation. Below zero it means nothing, so it stops there.
    """
    lost = (restart_s + interval_s / 2 + save.duration_s - save.blocked_s) / mean_time_between_failures_s
    return max(0.0, 1.0 - lost) / (1.0 + save.blocked_s / interval_s)
