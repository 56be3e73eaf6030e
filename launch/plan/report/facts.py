"""What the page shows: a search, the schedule and the failures of its first layout, and what was assumed."""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.report.assumptions import Assumption, assumptions_of
from launch.plan.report.goodput_figure import Curve, Marked, Point
from megalite.planner.hardware import Cluster
from megalite.planner.job import Job
from megalite.planner.reliability import (
    GoodputPoint,
    Reliability,
    Scale,
    at_scale,
    goodput_against_gpus,
    goodput_against_interval,
)
from megalite.planner.reliability_checkpoint import megalite_bytes_per_parameter
from megalite.planner.reliability_rates import DEFAULT_RATE, PUBLISHED_BAND
from megalite.planner.schedules import PipelineTimes, Schedule, Timeline, simulate_schedule
from megalite.planner.search import Candidate, SearchResult
from megalite.planner.shapes import parameters
from megalite.planner.step_time import StepTime
from megalite.planner.units import duration, percent, plural

LARGEST_SIZE = 16_384  # accelerators, in the curve over cluster sizes; or four times the plan's own

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
INTERVALS_S = (
    1.0,
    5.0,
    20.0,
    MINUTE_S,
    5 * MINUTE_S,
    20 * MINUTE_S,
    HOUR_S,
    4 * HOUR_S,
    12 * HOUR_S,
    2 * DAY_S,
    7 * DAY_S,
)


@dataclass(frozen=True)
class Facts:
    """All that is drawn."""

    title: str
    cluster: Cluster
    result: SearchResult
    winner: Candidate
    timeline: Timeline
    assumed: Reliability
    at_size: Scale  # failures and saves on the winner's own number of accelerators
    by_interval: Curve
    by_size: Curve
    assumptions: tuple[Assumption, ...]


def facts_of(result: SearchResult, cluster: Cluster, title: str) -> Facts:
    """Simulates the schedule of the fastest layout, and asks what failures cost it."""
    winner = result.best
    if winner is None:
        raise ValueError("a report needs a layout that fits")
    job = winner.job
    assumed, gpus = reliability_of(job, cluster)
    scale = at_scale(assumed, gpus)
    return Facts(
        title=title,
        cluster=cluster,
        result=result,
        winner=winner,
        timeline=timeline_of(job, winner.time),
        assumed=assumed,
        at_size=scale,
        by_interval=interval_curve(assumed, scale),
        by_size=size_curve(assumed, gpus),
        assumptions=assumptions_of(winner, cluster, assumed, scale),
    )


def timeline_of(job: Job, time: StepTime) -> Timeline:
    """The schedule that the layout trains with, 1F1B or interleaved."""
    times = PipelineTimes(
        [stage.forward_s for stage in time.stages],
        [stage.backward_s for stage in time.stages],
        time.between_stages_s,
    )
    chunks = job.layout.interleave
    schedule = Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
    return simulate_schedule(schedule, times, job.micro_batches, chunks)


def reliability_of(job: Job, cluster: Cluster) -> tuple[Reliability, int]:
    """What is assumed of the run, and the accelerators of the nodes that it takes: a node fails as a whole."""
    per_node = cluster.accelerators_per_node
    nodes = -(-job.layout.world_size // per_node)
    assumed = Reliability(
        parameters=parameters(job.model),
        bytes_per_parameter=megalite_bytes_per_parameter(job.optimizer),
        gpus_per_node=per_node,
    )
    return assumed, nodes * per_node


def interval_curve(assumed: Reliability, best: Scale) -> Curve:
    """Goodput against what may be set as the checkpoint interval; the best one is marked."""
    words = f"best: every {duration(best.interval_s)}"
    points = tuple(_point(point.interval_s, point) for point in goodput_against_interval(assumed, best.gpus))
    shown = {tick: duration(tick) for tick in INTERVALS_S if points[0].x <= tick <= points[-1].x}
    marked = Marked(best.interval_s, best.goodput, words)
    return Curve(points, marked, "training between two checkpoints", shown, lambda x: f"every {duration(x)}")


def size_curve(assumed: Reliability, gpus: int) -> Curve:
    """Goodput on other numbers of accelerators, each with its best interval; the plan's own is marked."""
    sizes, size = {gpus}, assumed.gpus_per_node
    while size <= max(LARGEST_SIZE, 4 * gpus):
        sizes.add(size)
        size *= 2
    points = tuple(_point(point.gpus, point) for point in goodput_against_gpus(assumed, sorted(sizes)))
    own = next(point for point in points if point.x == gpus)
    marked = Marked(gpus, own.goodput, plural(gpus, "accelerator"))
    powers = (assumed.gpus_per_node * 4**power for power in range(20))
    shown = {float(tick): f"{tick:,}" for tick in powers if tick <= points[-1].x}
    return Curve(points, marked, "accelerators", shown, lambda x: plural(round(x), "accelerator"))


def _point(x: float, point: GoodputPoint) -> Point:
    worse, better = point.goodput_band
    return Point(x, point.goodput, with_fewest_failures=better, with_most_failures=worse)


def goodput_words(scale: Scale, assumed: Reliability) -> str:
    """What both curves show, and what to do about it."""
    worse, better = scale.goodput_band
    losses = {part: scale.hours[part] for part in ("writes", "rework", "restarts")}
    worst = max(losses, key=lambda part: losses[part])
    remedy = {
        "writes": "more writers, or saves in the background, shrink it",
        "rework": "cheaper and therefore more frequent checkpoints shrink it",
        "restarts": "noticing failures and starting again faster shrinks it",
    }[worst]
    low, high = PUBLISHED_BAND
    return (
        f"The part of wall time that moves training forward, where failures, writes and restarts take the rest. Save "
        f"every {duration(scale.interval_s)}: {percent(scale.goodput)} at {DEFAULT_RATE:g} failures per 1,000 "
        f"node-days, {percent(worse)} to {percent(better)} over the published band of {low:g} to {high:g}, which is "
        "shaded. The curve is flat around its best: half or twice the interval costs little. Of "
        f"{assumed.days:g} days, {duration(scale.lost_hours * 3600)} are lost, most of that to {worst}; {remedy}."
    )
