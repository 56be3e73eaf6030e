"""The numbers that the predictions of a page rest on, and where each is from."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.planner.hardware import Cluster
from megalite.planner.memory import CUDA, StageMemory
from megalite.planner.reliability import Reliability, Scale
from megalite.planner.reliability_checkpoint import PER_NODE
from megalite.planner.reliability_rates import DEFAULT_RATE, PUBLISHED_BAND
from megalite.planner.search import Candidate
from megalite.planner.units import count, duration, gib, percent, plural


@dataclass(frozen=True)
class Assumption:
    """A number that the predictions rest on."""

    what: str
    value: str
    source: str


def assumptions_of(winner: Candidate, cluster: Cluster, assumed: Reliability, scale: Scale) -> tuple[Assumption, ...]:
    """The numbers to doubt first."""
    job = winner.job
    accelerator, (low, high) = cluster.accelerator, PUBLISHED_BAND
    storage = assumed.storage
    writers = "one writer a node" if storage.writers == PER_NODE else f"writers: {storage.writers}"
    limit = storage.storage_bytes_per_s
    at_most = "" if limit is None else f", {limit / 1e9:g} GB/s in all at most"
    is_guess = accelerator.calibrated_on.startswith("a guess")
    peak = cluster.peak_flops(job.dtype) / 1e12
    return (
        Assumption(
            "calibrated constant: part of the peak that large matrix products reach",
            f"{accelerator.efficiency:.3g} of {peak:.4g} TFLOP/s in {job.dtype}",
            accelerator.calibrated_on if is_guess else f"fitted on {accelerator.calibrated_on}",
        ),
        Assumption(
            f"{cluster.accelerator_name}: memory, and its bandwidth",
            f"{gib(cluster.memory_bytes)}, {accelerator.memory_gb_per_s:.4g} GB/s",
            accelerator.source or "not said",
        ),
        _allocator(winner.fullest),
        Assumption("link inside a node, each way", f"{cluster.intra_node.gb_per_s:.3g} GB/s", _source(cluster, True)),
        Assumption(
            "links between nodes, each way",
            f"{cluster.adapters_per_node} x {cluster.inter_node.gb_per_s:.3g} GB/s a node",
            _source(cluster, False),
        ),
        Assumption(
            "failures per 1,000 node-days",
            f"{DEFAULT_RATE:g}; published: {low:g} to {high:g}",
            f"one failure every {duration(scale.mtbf_hours * 3600)} on {plural(scale.nodes, 'node')}, "
            f"{duration(scale.mtbf_hours_band[0] * 3600)} to {duration(scale.mtbf_hours_band[1] * 3600)} over the band",
        ),
        Assumption(
            "checkpoint",
            f"{count(assumed.checkpoint_bytes)}B, written in {duration(scale.save.duration_s)}",
            f"{assumed.bytes_per_parameter:g} bytes a parameter; {writers} at {storage.writer_bytes_per_s / 1e9:g} "
            f"GB/s{at_most}; {'in the background' if storage.background else 'training waits'}",
        ),
        Assumption(
            "after a failure",
            f"{duration(assumed.down_s)} without training",
            f"{duration(assumed.detection_s)} until it is noticed, {duration(assumed.restart_s)} to start again",
        ),
    )


def _allocator(stage: StageMemory) -> Assumption:
    around = {name: stage.parts.get(name, 0.0) for name in ("allocator", "context")}
    tensors = stage.total - sum(around.values())
    share = around["allocator"] / tensors
    return Assumption(
        "memory beside tensors: kept by the allocator and not used, and the process's own",
        f"{percent(share)} of tensors + {gib(around['context'])}",
        "a usual value, not fitted" if abs(share - CUDA.fragments) < 1e-6 else "docs/planner.md",
    )


def _source(cluster: Cluster, inside: bool) -> str:
    return (cluster.intra_node if inside else cluster.inter_node).source or "not said"
