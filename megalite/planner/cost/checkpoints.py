"""Checkpoints of a job with random failures: size, time to write, best interval, useful time, by closed forms.

Failures are a Poisson process with a mean time between failures (MTBF) M. All durations are in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from megalite.config import ModelConfig
from megalite.planner.cost.model_states import MOMENTS
from megalite.planner.cost.muon import orthogonalized_numbers
from megalite.planner.cost.stage_parameters import stage_shapes

TOO_LONG = 700.0  # exp of more is no float: nothing is ever finished
LONGEST_INTERVAL_S = 3600.0
SHORTEST_INTERVAL_S = 900.0
SHORTEST_IN_SAVES = (
    100  # times what a save takes, where that is less: storage is then busy with them for 1 % of the time
)
MOST_LOST = 0.01  # of the work, to failures, for the sake of storage
LONGEST_IN_SAVES = 100  # times what a save blocks, where that is more than `LONGEST_INTERVAL_S`: saves then cost 1 %


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


def planned_interval_s(save: Save, mean_time_between_failures_s: float) -> float:
    """Returns the seconds of training between two saves under `checkpoint.interval: auto`, in plans and in runs.

    It is `best_interval_s`, but at most an hour, or 100 times what a save blocks where that is longer: machines fail
    seldom, but runs are also ended by people, drivers and schedulers, which no failure rate counts. A save in the
    background must be complete before the next one, so no interval is shorter than that takes.

    Nor is it shorter than a quarter of an hour, or 100 times what a save takes in all where that is less: a save in the
    background hardly blocks training, but storage has to bear its bytes. Where machines fail so often that this would
    throw away more than 1 % of the work, it gives way.
    """
    shortest_s, best_s = _shortest_s(save), _best_s(save, mean_time_between_failures_s)
    borne_s = min(SHORTEST_INTERVAL_S, SHORTEST_IN_SAVES * save.duration_s)
    borne_s = min(borne_s, 2 * MOST_LOST * mean_time_between_failures_s)  # half an interval is lost to a failure
    return max(shortest_s, borne_s, min(best_s, max(LONGEST_INTERVAL_S, LONGEST_IN_SAVES * save.blocked_s)))


def is_for_storage(save: Save, mean_time_between_failures_s: float) -> bool:
    """Returns whether storage makes the planned interval longer than the one that loses least time."""
    return planned_interval_s(save, mean_time_between_failures_s) > _best_s(save, mean_time_between_failures_s)


def _best_s(save: Save, mean_time_between_failures_s: float) -> float:
    return best_interval_s(save.blocked_s, mean_time_between_failures_s, _shortest_s(save))


def _shortest_s(save: Save) -> float:
    """Returns the time of a save in the background, during which no other can begin."""
    return save.duration_s if save.duration_s > save.blocked_s else 0.0


class Contents(StrEnum):
    """Tensors that a checkpoint holds of each parameter."""

    MASTERS = "masters"
    """fp32 weights and both Adam moments, 4 + 4 + 4: what megalite writes. The weights in half precision are these,
    rounded, so they are not stored (docs/checkpoints.md)."""

    MIXED = "mixed"
    """Half-precision weights beside the three fp32 tensors, 2 + 4 + 4 + 4: what many stacks and worked examples
    count."""

    GRADIENTS = "gradients"
    """The three fp32 tensors and fp32 gradients, 4 + 4 + 4 + 4: everything that a step in fp32 leaves behind. With
    half-precision weights as well it would be 18."""


BYTES_PER_PARAMETER = {Contents.MASTERS: 12, Contents.MIXED: 14, Contents.GRADIENTS: 16}
PER_NODE = "nodes"
PER_GPU = "gpus"


def megalite_bytes_per_parameter(optimizer: str, model: ModelConfig) -> float:
    """Returns the bytes per parameter in checkpoints of `megalite train`: weights and moments in fp32."""
    (whole,) = stage_shapes(model, 1, 1)
    with_one = orthogonalized_numbers(model, whole, 1) / whole.parameters if optimizer == "muon" else 0.0
    return 4 * (1 + MOMENTS[optimizer] - with_one)


@dataclass(frozen=True)
class Storage:
    """Writers of a checkpoint and their speed."""

    writers: int | str = PER_NODE  # a number of them, one per node, or one per GPU
    writer_bytes_per_s: float = 7e9  # the worked example's; about one NVMe drive
    storage_bytes_per_s: float | None = 100e9  # all writers together get no more; None: no limit
    background: bool = False
    copy_bytes_per_s: float = 10e9  # per GPU, to host memory: how long a background save blocks

    def writers_on(self, gpus: int, nodes: int) -> int:
        """Returns the number of writers, at most one per GPU: each writes what it holds."""
        if isinstance(self.writers, int):
            return min(self.writers, gpus)
        return nodes if self.writers == PER_NODE else gpus

    def save(self, checkpoint_bytes: float, gpus: int, nodes: int) -> Save:
        """Returns the times of a save with equal parts for all writers. In the background a copy to the host blocks,
        each GPU its own part, and the write begins after it."""
        together = self.writers_on(gpus, nodes) * self.writer_bytes_per_s
        limit = together if self.storage_bytes_per_s is None else self.storage_bytes_per_s
        write_s = checkpoint_bytes / min(together, limit)
        if not self.background:
            return Save(write_s, write_s)
        copy_s = checkpoint_bytes / gpus / self.copy_bytes_per_s
        return Save(copy_s, copy_s + write_s)


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


def expected_ettr(interval_s: float, save: Save, mean_time_between_failures_s: float, restart_s: float) -> float:
    """Returns the effective training time ratio, E[ETTR] = (1 - N r (u0 + dt/2)) / (1 + w/dt), where N r = 1/MTBF.

    Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025
    (arXiv:2410.21680): N nodes fail at rate r each, u0 is the restart, dt the interval, w the save. Its authors find it
    within about 5 % of their Monte Carlo simulation. Below zero it means nothing, so it stops there.
    """
    lost = (restart_s + interval_s / 2 + save.duration_s - save.blocked_s) / mean_time_between_failures_s
    return max(0.0, 1.0 - lost) / (1.0 + save.blocked_s / interval_s)
