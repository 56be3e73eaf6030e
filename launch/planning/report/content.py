"""The data of the report: a search, the schedule and the failures of its best layout, and the assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from launch.planning.report.assumptions import Assumption, assumptions_of
from megalite.planner.cost.shapes import parameters
from megalite.planner.hardware import Cluster
from megalite.planner.reliability.checkpoints import megalite_bytes_per_parameter
from megalite.planner.reliability.goodput_model import JobScale, Reliability, at_scale
from megalite.planner.schedules import PipelineTimes, Schedule, Timeline, simulate_schedule
from megalite.planner.search import LayoutCandidate, SearchResult


@dataclass(frozen=True)
class ReportContent:
    """Everything that the report shows."""

    title: str
    cluster: Cluster
    result: SearchResult
    winner: LayoutCandidate
    timeline: Timeline
    assumed: Reliability
    scale: JobScale  # failures and saves on all accelerators of the winner's nodes
    assumptions: tuple[Assumption, ...]


def report_content(result: SearchResult, cluster: Cluster, title: str) -> ReportContent:
    """Simulates the pipeline schedule of the fastest layout (1F1B or interleaved) and predicts its goodput."""
    winner = result.best
    if winner is None:
        raise ValueError("a report needs a layout that fits")
    job, time = winner.job, winner.time
    times = PipelineTimes(
        [stage.forward_s for stage in time.stages], [stage.backward_s for stage in time.stages], time.between_stages_s
    )
    chunks = job.layout.interleave
    schedule = Schedule.INTERLEAVED if chunks > 1 else Schedule.ONE_F_ONE_B
    per_node = cluster.accelerators_per_node
    assumed = Reliability(
        parameters=parameters(job.model),
        bytes_per_parameter=megalite_bytes_per_parameter(job.optimizer),
        gpus_per_node=per_node,
    )
    nodes = -(-job.layout.world_size // per_node)  # a node fails as a whole
    scale = at_scale(assumed, nodes * per_node)
    return ReportContent(
        title=title,
        cluster=cluster,
        result=result,
        winner=winner,
        timeline=simulate_schedule(schedule, times, job.micro_batches, chunks),
        assumed=assumed,
        scale=scale,
        assumptions=assumptions_of(winner, cluster, assumed, scale),
    )
