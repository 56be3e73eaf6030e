"""The pipeline of a step taken apart: what it took, beside what the same passes take in the planner's simulation.

Each pass is given the median that was measured for its kind and chunk. The simulated step with the mean of all stages
is longer than the work of one by the schedule's own bubble; with each stage's own medians, longer again by the
imbalance of the stages. The time that ranks were blocked in messages on their way, on average, are the transfers. What
is left is jitter: passes that took longer than their median, slow replicas, and the work between passes. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from megalite.config import ConfigError
from megalite.monitor.steps.message_pairs import transfers, waited_s
from megalite.monitor.steps.parts import PARTS, parts_of
from megalite.monitor.steps.passes import TimedPass, passes_of
from megalite.monitor.steps.timeline import RankTimeline
from megalite.schedules.passes import PassKind, Task
from megalite.schedules.simulation import PipelineTimes, makespan_of_passes, simulate_schedule
from megalite.schedules.tables import Schedule, placement, position_of


@dataclass(frozen=True)
class MeasuredStage:
    """The medians of one stage, of one micro-batch through all of its chunks, over its ranks and micro-batches."""

    stage: int
    forward_s: float
    backward_s: float  # both gradients
    weight_gradient_s: float | None  # the part of backward that came apart; None: none did

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Straggler:
    """The rank whose passes took most time beyond the medians of its stage."""

    rank: int
    host: str
    excess_s: float


@dataclass(frozen=True)
class PipelineParts:
    """The time from the first pass of a step on any rank to the end of the last one, as parts that add up to it."""

    step: int
    schedule: str
    chunks: int  # of a stage
    micro_batches: int  # of a replica
    span_s: float
    work_s: float  # of a mean stage, with its tensor collectives
    bubble_s: float  # the schedule's own, if all stages were equal
    imbalance_s: float  # of stages and their chunks, which may suit a schedule, so that it is below 0
    transfers_s: float
    jitter_s: float  # and stragglers; what is left, so it may be below 0
    stages: tuple[MeasuredStage, ...]
    idle_share: Mapping[int, float]  # rank -> part of the span in which it computed no pass
    straggler: Straggler

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts by their names in sentences."""
        return {
            "work": self.work_s,
            "the schedule's own bubble": self.bubble_s,
            "stage imbalance": self.imbalance_s,
            "transfers": self.transfers_s,
            "jitter and stragglers": self.jitter_s,
        }

    @property
    def idle_of_span(self) -> float:
        """Idle share of the span, mean over ranks: (p - 1) / (m + p - 1) for 1F1B of equal stages and nothing else."""
        return fmean(self.idle_share.values())

    @property
    def idle_over_work(self) -> float:
        """Idle time over working time: (p - 1) / m for 1F1B of equal stages and nothing else."""
        return self.idle_of_span / (1 - self.idle_of_span)

    @property
    def own_idle_of_span(self) -> float:
        """Idle share of the span that the schedule alone would have."""
        return self.bubble_s / (self.work_s + self.bubble_s)

    @property
    def own_idle_over_work(self) -> float:
        """Idle time over working time that the schedule alone would have."""
        return self.bubble_s / self.work_s

    @property
    def slowest_stage(self) -> MeasuredStage:
        return max(self.stages, key=lambda stage: stage.seconds)

    @property
    def slowest_over_mean(self) -> float:
        """Time of the slowest stage over that of a mean one."""
        return self.slowest_stage.seconds / fmean(stage.seconds for stage in self.stages)


def pipeline_parts(timelines: Mapping[int, RankTimeline]) -> PipelineParts | None:
    """Takes the pipeline of a step apart; returns None where the model is not cut into stages.

    `timelines` are of one step and on one clock. Raises ValueError, with a sentence, where they do not hold whole steps
    of all stages.
    """
    owner = next(iter(timelines.values())).owner
    if owner.pipeline_parallel_size == 1:
        return None
    schedule, stages, chunks = Schedule(owner.schedule), owner.pipeline_parallel_size, owner.chunks
    ranks_of = _ranks_of_stages(timelines, stages)
    passes = {rank: passes_of(timeline) for rank, timeline in timelines.items()}
    chunk_at = {position_of(schedule, stages, s, chunk): chunk for s in range(stages) for chunk in range(chunks)}
    measured: dict[tuple[PassKind, int], list[float]] = defaultdict(list)
    for each in (one for of_rank in passes.values() for one in of_rank):
        if each.position not in chunk_at:
            raise ValueError(f"a pass at position {each.position} is none of {stages} stages of {chunks} chunks")
        measured[each.kind, each.position].append(each.seconds)
    medians = {key: median(seconds) for key, seconds in measured.items()}
    orders = [
        [Task(each.kind, each.micro_batch, chunk_at[each.position]) for each in passes[ranks[0]]] for ranks in ranks_of
    ]
    in_order = [passes[ranks[0]] for ranks in ranks_of]
    of_stages = tuple(_stage(stage, each, medians, owner.micro_batches) for stage, each in enumerate(in_order))
    where = placement(schedule, stages, chunks)
    uneven_s = makespan_of_passes(orders, where, medians)
    even_s = makespan_of_passes(orders, where, _even(medians))
    work_s = owner.micro_batches * fmean(stage.seconds for stage in of_stages)
    began = min(each.start for of_rank in passes.values() for each in of_rank)
    ended = max(each.end for of_rank in passes.values() for each in of_rank)
    if not (work_s > 0 and ended > began):
        raise ValueError(f"the passes of step {timelines[ranks_of[0][0]].step} took no time: its record is damaged")
    transfers_s = fmean(
        sum(max(0.0, min(each.end, ended) - max(each.start, began)) for each in of_rank)
        for of_rank in transfers(timelines).values()
    )
    return PipelineParts(
        step=timelines[ranks_of[0][0]].step,
        schedule=schedule.value,
        chunks=chunks,
        micro_batches=owner.micro_batches,
        span_s=ended - began,
        work_s=work_s,
        bubble_s=even_s - work_s,
        imbalance_s=uneven_s - even_s,
        transfers_s=transfers_s,
        jitter_s=ended - began - uneven_s - transfers_s,
        stages=of_stages,
        idle_share={rank: 1 - sum(each.seconds for each in of) / (ended - began) for rank, of in passes.items()},
        straggler=_straggler(timelines, passes, medians),
    )


def simulated_s(found: PipelineParts, schedule: Schedule) -> float | None:
    """Returns what the measured stages would take under a schedule, without transfers and jitter, in seconds.

    None where it needs the model cut in another way, or other numbers of micro-batches. Where the gradients of weights
    did not come apart, they are taken for half of backward.
    """
    stages = len(found.stages)
    where = placement(Schedule(found.schedule), stages, found.chunks)
    weight_s = [
        stage.backward_s / 2 if stage.weight_gradient_s is None else stage.weight_gradient_s for stage in found.stages
    ]
    times = PipelineTimes(
        [stage.forward_s for stage in found.stages],
        [stage.backward_s for stage in found.stages],
        weight_gradient_s=weight_s,
    )
    try:
        timeline = simulate_schedule(schedule, times, found.micro_batches, found.chunks)
    except ConfigError:
        return None
    return timeline.makespan_s if placement(schedule, stages, found.chunks) == where else None


def parts_by_rank(timelines: Mapping[int, RankTimeline]) -> dict[int, dict[str, float]]:
    """Returns the seconds of each part of the step on each rank; `timelines` are of one step and on one clock."""
    waited = waited_s(timelines)
    return {
        rank: parts_of(timeline.spans(), sorted(timeline.collectives), waited[rank])
        for rank, timeline in timelines.items()
    }


def mean_parts(timelines: Mapping[int, RankTimeline]) -> dict[str, float]:
    """Returns the seconds of each part of the step, mean over ranks, which add up to its wall time."""
    by_rank = parts_by_rank(timelines).values()
    return {part: fmean(parts[part] for parts in by_rank) for part in PARTS}


def _ranks_of_stages(timelines: Mapping[int, RankTimeline], stages: int) -> list[list[int]]:
    ranks: list[list[int]] = [[] for _ in range(stages)]
    for rank, timeline in timelines.items():
        ranks[timeline.owner.stage].append(rank)
    if missing := [str(stage) for stage, of_stage in enumerate(ranks) if not of_stage]:
        others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ValueError(
            f"step {next(iter(timelines.values())).step} has no timeline of stage {missing[0]}{others}, so its bubble "
            "cannot be told: monitor.timeline.ranks all keeps those of all ranks"
        )
    return ranks


def _stage(
    stage: int, passes: Sequence[TimedPass], medians: Mapping[tuple[PassKind, int], float], micro_batches: int
) -> MeasuredStage:
    seconds: dict[PassKind, float] = defaultdict(float)
    for each in passes:
        seconds[each.kind] += medians[each.kind, each.position] / micro_batches
    forward_s, weight_s = seconds[PassKind.FORWARD], seconds.get(PassKind.WEIGHT_GRADIENT)
    return MeasuredStage(stage, forward_s, sum(seconds.values()) - forward_s, weight_s)


def _even(medians: Mapping[tuple[PassKind, int], float]) -> dict[tuple[PassKind, int], float]:
    """Returns the times of equal chunks that do as much work together."""
    by_kind: dict[PassKind, list[float]] = defaultdict(list)
    for (kind, _), seconds in medians.items():
        by_kind[kind].append(seconds)
    return {(kind, position): fmean(by_kind[kind]) for kind, position in medians}


def _straggler(
    timelines: Mapping[int, RankTimeline],
    passes: Mapping[int, Sequence[TimedPass]],
    medians: Mapping[tuple[PassKind, int], float],
) -> Straggler:
    excess = {
        rank: sum(each.seconds - medians[each.kind, each.position] for each in of_rank)
        for rank, of_rank in passes.items()
    }
    rank = max(excess, key=lambda each: excess[each])
    return Straggler(rank, timelines[rank].owner.host, excess[rank])
