"""The assumptions behind the predictions of the report, each with its source."""

from __future__ import annotations

from megalite.planner.cost.memory import CUDA
from megalite.planner.hardware import Cluster
from megalite.planner.reliability.checkpoints import PER_NODE
from megalite.planner.reliability.failure_rates import DEFAULT_RATE, PUBLISHED_BAND
from megalite.planner.reliability.goodput_model import JobScale, Reliability
from megalite.planner.search import LayoutCandidate
from megalite.planner.units import count, duration, gib, percent, plural


def assumptions_of(
    winner: LayoutCandidate, cluster: Cluster, assumed: Reliability, scale: JobScale
) -> tuple[tuple[str, str, str], ...]:
    """Lists the assumptions, the least certain ones first: what is assumed, its value and the source."""
    job = winner.job
    accelerator, (low, high) = cluster.accelerator, PUBLISHED_BAND
    storage = assumed.storage
    writers = "one writer a node" if storage.writers == PER_NODE else f"writers: {storage.writers}"
    limit = storage.storage_bytes_per_s
    at_most = "" if limit is None else f", {limit / 1e9:g} GB/s in total at most"
    is_guess = accelerator.calibrated_on.startswith("a guess")
    parts = winner.fullest.parts
    allocator, context = parts.get("allocator", 0.0), parts.get("context", 0.0)
    allocator_share = allocator / (winner.fullest.total - allocator - context)
    peak = cluster.peak_flops(job.dtype) / 1e12
    return (
        (
            "calibrated constant: part of the peak that large matrix products reach",
            f"{accelerator.efficiency:.3g} of {peak:.4g} TFLOP/s in {job.dtype}",
            accelerator.calibrated_on if is_guess else f"fitted on {accelerator.calibrated_on}",
        ),
        (
            f"{cluster.accelerator_name}: memory, and its bandwidth",
            f"{gib(cluster.memory_bytes)}, {accelerator.memory_gb_per_s:.4g} GB/s",
            accelerator.source or "unknown",
        ),
        (
            "memory besides tensors: unused blocks of the allocator, and the CUDA context",
            f"{percent(allocator_share)} of tensors + {gib(context)}",
            "a typical value, not fitted" if abs(allocator_share - CUDA.fragments) < 1e-6 else "docs/planner.md",
        ),
        (
            "link inside a node, each way",
            f"{cluster.intra_node.gb_per_s:.3g} GB/s",
            cluster.intra_node.source or "unknown",
        ),
        (
            "links between nodes, each way",
            f"{cluster.adapters_per_node} x {cluster.inter_node.gb_per_s:.3g} GB/s a node",
            cluster.inter_node.source or "unknown",
        ),
        (
            "failures per 1,000 node-days",
            f"{DEFAULT_RATE:g}; published: {low:g} to {high:g}",
            f"one failure every {duration(scale.mtbf_hours * 3600)} on {plural(scale.nodes, 'node')}, "
            f"{duration(scale.mtbf_hours_at_high_rate * 3600)} to {duration(scale.mtbf_hours_at_low_rate * 3600)} over "
            "the band",
        ),
        (
            "checkpoint",
            f"{count(assumed.checkpoint_bytes)}B, written in {duration(scale.save_duration_s)}",
            f"{assumed.bytes_per_parameter:g} bytes a parameter; {writers} at {storage.writer_bytes_per_s / 1e9:g} "
            f"GB/s{at_most}; {'in the background' if storage.background else 'training waits'}",
        ),
        (
            "after a failure",
            f"{duration(assumed.down_s)} without training",
            f"{duration(assumed.detection_s)} until it is detected, {duration(assumed.restart_s)} to restart",
        ),
    )
