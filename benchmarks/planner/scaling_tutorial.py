"""Recomputes the worked example "Scaling to 1000 GPUs": its tables and exercises as printed, and the contradictions
between its text and its numbers.

    python -m benchmarks.planner.scaling_tutorial    # writes the answer that `--preset tutorial` prints

The answer depends on no option, so `megalite plan reliability` reads it from a file; a test compares the two.

Llama 3 70B on DGX H100 nodes of 8 GPUs, tensor parallelism 8, no pipeline, 30 days. What it counts is first order and
its own: one writer, an interval for writes of 60 s, no restarts. For figures to plan with: reliability.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from launch.planning.tables.reliability import TUTORIAL
from megalite.planner.cost.checkpoints import BYTES_PER_PARAMETER, Contents, Save, Storage, TimeShares, young_interval_s
from megalite.planner.failure_rates import HOURS_PER_DAY, PUBLISHED_BAND, Components, failure_probability, mtbf_hours

GPUS = (8, 32, 64, 128, 256, 512, 1024)
LOSS_GPUS = (64, 256, 512, 1024)
COMPONENTS = Components()
PARAMETERS = 70.6e9
RUN_HOURS = 30 * HOURS_PER_DAY
PLANNED_WRITE_S = 60.0  # what its interval is for
COMPUTE_S = 6.6428  # of a step, as printed: traffic of weights, without FLOPs
CHECKPOINT_BYTES = PARAMETERS * BYTES_PER_PARAMETER[Contents.MIXED]
ONE_WRITER = Storage(writers=1, storage_bytes_per_s=None)
CHARGED_SAVE = ONE_WRITER.save(CHECKPOINT_BYTES, 8, 1)


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


@dataclass(frozen=True)
class ScaleRow:
    """A row of the first table."""

    gpus: int
    nodes: int
    mtbf_hours: float
    failures: float  # in 30 days
    interval_hours: float  # Young 1974, for writes of 60 s


@dataclass(frozen=True)
class LossRow:
    """Hours lost in 30 days."""

    gpus: int
    communication_hours: float
    checkpoint_hours: float  # writes, and half an interval per failure

    @property
    def ratio(self) -> float:
        return self.checkpoint_hours / self.communication_hours


@dataclass(frozen=True)
class SweepRow:
    """Efficiency of one step."""

    gpus: int
    communication_s: float

    @property
    def efficiency(self) -> float:
        return COMPUTE_S / (COMPUTE_S + self.communication_s)


@dataclass(frozen=True)
class Exercise:
    """A question of the text, and its answer computed."""

    question: str
    answer: str


def tutorial_mtbf_hours(gpus: int, components: Components = COMPONENTS) -> float:
    return mtbf_hours(components.rate_per_1000_node_days, gpus // components.gpus_per_node)


def scale_row(gpus: int) -> ScaleRow:
    mtbf_h = tutorial_mtbf_hours(gpus)
    interval_h = young_interval_s(PLANNED_WRITE_S, mtbf_h * 3600) / 3600
    return ScaleRow(gpus, gpus // 8, mtbf_h, RUN_HOURS / mtbf_h, interval_h)


def communication_s(gpus: int) -> float:
    """Returns the communication seconds of a step. The text's formula is not available; this one gives all seven
    printed values to their last digit.

    V = 2 bytes x parameters / 8 once over a link of 900 GB/s for tensor parallelism. Up to 8 replicas are a ring over
    that link, 2 (d-1)/d V; more are n = d/8 groups: the ring of 8 twice, then 2 (n-1)/n V at 50 GB/s and 5 us for each
    of 2 (n-1) messages.
    """
    volume, replicas = 2 * PARAMETERS / 8, gpus // 8
    inside_s = volume / 900e9
    if replicas <= 8:
        return inside_s + 2 * (replicas - 1) / replicas * inside_s
    groups = replicas / 8
    return inside_s * (1 + 2 * 2 * 7 / 8) + 2 * (groups - 1) * (volume / groups / 50e9 + 5e-6)


def checkpoint_hours(gpus: int, interval_s: float, save: Save = CHARGED_SAVE) -> float:
    """Returns the hours lost in 30 days to writes and to the work since the last one."""
    shares = first_order_shares(interval_s, save, tutorial_mtbf_hours(gpus) * 3600, 0.0)
    return RUN_HOURS * (shares.writes + shares.rework)


def loss_row(gpus: int) -> LossRow:
    communication_hours = RUN_HOURS * (1 - SweepRow(gpus, communication_s(gpus)).efficiency)
    return LossRow(gpus, communication_hours, checkpoint_hours(gpus, scale_row(gpus).interval_hours * 3600))


def scale_table() -> tuple[ScaleRow, ...]:
    return tuple(scale_row(gpus) for gpus in GPUS)


def loss_table() -> tuple[LossRow, ...]:
    return tuple(loss_row(gpus) for gpus in LOSS_GPUS)


def sweep_table() -> tuple[SweepRow, ...]:
    return tuple(SweepRow(gpus, communication_s(gpus)) for gpus in GPUS)


def swept_interval_s(gpus: int, step_s: int = 1) -> int:
    """Returns the interval in whole seconds, up to ten hours, that loses least."""
    mtbf_s, save = tutorial_mtbf_hours(gpus) * 3600, Save(PLANNED_WRITE_S, PLANNED_WRITE_S)

    def lost(interval_s: int) -> float:
        shares = first_order_shares(interval_s, save, mtbf_s, 0.0)
        return shares.writes + shares.rework

    return min(range(step_s, 36_000, step_s), key=lost)


BETTER_GPUS = Components(gpu_mttf_hours=2 * COMPONENTS.gpu_mttf_hours)


def same_mtbf_gpus(gpus: int, components: Components) -> float:
    """Returns how many GPUs made of `components` have the same MTBF as `gpus` of the text's."""
    return gpus * COMPONENTS.rate_per_1000_node_days / components.rate_per_1000_node_days


def exercises() -> tuple[Exercise, ...]:
    large, better = scale_row(2048), tutorial_mtbf_hours(1024, BETTER_GPUS)
    swept_s, young_s = swept_interval_s(512), scale_row(512).interval_hours * 3600
    return (
        Exercise("2,048 GPUs", f"MTBF {large.mtbf_hours:.2f} h, {large.failures:.1f} failures in 30 days"),
        Exercise(
            "512 GPUs, intervals swept in steps of 1 s",
            f"{swept_s:,} s lose least; Young's formula gives {young_s:,.1f} s: equal",
        ),
        Exercise(
            "GPU MTTF doubled to 100,000 h, 1,024 GPUs",
            f"MTBF from {tutorial_mtbf_hours(1024):.1f} to {better:.2f} h, {better / tutorial_mtbf_hours(1024):.2f}x, "
            "not 2x: adapters and power supplies do not improve",
        ),
        Exercise("GPU MTTF doubled, same MTBF as 512 GPUs had", f"{same_mtbf_gpus(512, BETTER_GPUS):.0f} GPUs"),
        Exercise(
            "at least one of 128 nodes fails, each with p = 1%", f"1 - 0.99^128 = {failure_probability(0.01, 128):.2%}"
        ),
    )


def contradictions() -> tuple[str, ...]:
    """Lists contradictions between the text and its numbers, each with the numbers recomputed."""
    return (*_of_losses(), *_of_checkpoints(), *_of_the_step(), *_of_rates())


def _of_losses() -> tuple[str, ...]:
    rows = {gpus: loss_row(gpus) for gpus in (128, *LOSS_GPUS)}
    largest = rows[1024]
    return (
        "Checkpoints are said to cost more than communication at scale; in its own table they cost less from 256 GPUs "
        f"up, {rows[256].checkpoint_hours:.1f} h against {rows[256].communication_hours:.1f} h there and "
        f"{largest.checkpoint_hours:.1f} h against {largest.communication_hours:.1f} h at 1,024 GPUs, and in the row "
        f"left out, 128 GPUs, too: {rows[128].checkpoint_hours:.1f} h against {rows[128].communication_hours:.1f} h.",
        f"The loss to checkpoints at 1,024 GPUs is {largest.checkpoint_hours:.1f} h of {RUN_HOURS:.0f} h, "
        f"{largest.checkpoint_hours / RUN_HOURS:.1%}, not 10-30%.",
        "Restarts are left out: at 10 minutes each they are "
        f"{scale_row(1024).failures / 6:.1f} h more at 1,024 GPUs ({scale_row(1024).failures:.1f} failures).",
    )


def _of_checkpoints() -> tuple[str, ...]:
    charged_s, mtbf_s = CHARGED_SAVE.duration_s, tutorial_mtbf_hours(1024) * 3600
    consistent_s = young_interval_s(charged_s, mtbf_s)

    def with_writers(limit: float | None) -> tuple[float, float]:
        save = Storage(writers=128, storage_bytes_per_s=limit).save(CHECKPOINT_BYTES, 1024, 128)
        interval_s = young_interval_s(save.blocked_s, mtbf_s)
        return save.blocked_s, checkpoint_hours(1024, interval_s, save) / RUN_HOURS

    (free_s, free_loss), (limited_s, limited_loss) = with_writers(None), with_writers(500e9)
    return (
        f"The interval at 1,024 GPUs is for writes of {PLANNED_WRITE_S:.0f} s, but {charged_s:.1f} s are charged for "
        f"each; with {charged_s:.1f} s for both the interval is {consistent_s / 60:.0f} min, not "
        f"{young_interval_s(PLANNED_WRITE_S, mtbf_s) / 60:.0f}, and {checkpoint_hours(1024, consistent_s):.1f} h are "
        f"lost, not {loss_row(1024).checkpoint_hours:.1f} h.",
        f"One writer for {CHECKPOINT_BYTES / 1e9:.1f} GB is no cluster: 128 writers of 7 GB/s, one per node, need "
        f"{limited_s:.1f} s on storage of 500 GB/s and lose {limited_loss:.2%} ({free_s:.1f} s and {free_loss:.2%} if "
        "the storage sets no limit), so writing is no longer what bounds the run.",
    )


def step_efficiency(tokens: int, peak_share: float, replicas: int = 128) -> float:
    """Returns the efficiency of a step on 1,024 GPUs, with FLOPs and activations counted; `tokens` are those of one
    replica.

    6 P FLOPs per token (Kaplan 2020), and per layer four all-reduces of 2 s b h bytes (Shoeybi 2019) in rings of 8 at
    450 GB/s. The reduction between replicas is the text's; nothing overlaps.
    """
    compute_s = 6 * PARAMETERS * tokens / (8 * 989e12 * peak_share)
    tensor_s = 4 * 80 * (2 * tokens * 8192) * 2 * 7 / 8 / 450e9
    data_s = communication_s(replicas * 8) - communication_s(8)
    return compute_s / (compute_s + tensor_s + data_s)


def _of_the_step() -> tuple[str, ...]:
    sweep = {row.gpus: row for row in sweep_table()}
    between_nodes = SweepRow(32, communication_s(8) + 2 * 3 / 4 * (2 * PARAMETERS / 8) / 50e9)
    at_peak, at_half = step_efficiency(65_536, 1.0), step_efficiency(16_384, 0.5)
    return (
        f"Its compute time, {COMPUTE_S * 1000:,.1f} ms, is traffic of weights without FLOPs, and its tensor-parallel "
        f"time, {communication_s(8) * 1000:.1f} ms, has no all-reduces of activations: with four per layer at "
        f"450 GB/s, not overlapped, efficiency at 1,024 GPUs is {at_peak:.0%} ({at_peak:.1%} with 65,536 tokens per "
        f"replica at the peak, {at_half:.1%} with 16,384 at half of it; the text names no batch), not "
        f"{sweep[1024].efficiency:.1%}.",
        f"Communication jumps from {sweep[64].communication_s * 1000:.1f} ms at 64 GPUs to "
        f"{sweep[128].communication_s * 1000:.1f} ms at 128 because up to 8 replicas count as neighbours on NVLink; "
        "but tensor parallelism 8 fills a node, so every replica is on another one: at 50 GB/s between nodes 32 GPUs "
        f"already need {between_nodes.communication_s * 1000:.1f} ms, efficiency {between_nodes.efficiency:.1%}, not "
        f"{sweep[32].efficiency:.1%}.",
        "The pipeline bubble does not shrink as 1/PP but grows with it, (p-1)/m of the ideal time: with 16 "
        f"micro-batches {3 / 16:.1%} at 4 stages and {7 / 16:.1%} at 8.",
    )


def _of_rates() -> tuple[str, ...]:
    redundant = Components(redundant_psu=True)
    rate = COMPONENTS.rate_per_1000_node_days
    low, high = PUBLISHED_BAND
    same = same_mtbf_gpus(512, BETTER_GPUS)
    fewer = int(same) // 8 * 8
    return (
        f"Power supplies of a DGX are redundant: without them a node's MTTF is {redundant.mttf_hours:,.1f} h, not "
        f"{COMPONENTS.mttf_hours:,.1f} h, and the MTBF at 1,024 GPUs {tutorial_mtbf_hours(1024, redundant):.1f} h, not "
        f"{tutorial_mtbf_hours(1024):.1f} h.",
        f"The {same:.0f} GPUs are no whole number of nodes: {fewer} ({tutorial_mtbf_hours(fewer, BETTER_GPUS):.1f} h) "
        f"or {fewer + 8} ({tutorial_mtbf_hours(fewer + 8, BETTER_GPUS):.1f} h) can be had, 512 had "
        f"{tutorial_mtbf_hours(512):.1f} h.",
        f"One figure is printed for each MTBF; its rate, {rate:.1f} per 1,000 node-days, lies in the published band of "
        f"{low:.0f} to {high:.0f}, by which 1,024 GPUs have {mtbf_hours(high, 128):.1f} to {mtbf_hours(low, 128):.1f} "
        "h.",
    )


def answer() -> dict[str, Any]:
    """Returns everything that `megalite plan reliability --preset tutorial` prints."""
    return {
        "node_mttf_hours": COMPONENTS.mttf_hours,
        "checkpoint_bytes": CHECKPOINT_BYTES,
        "checkpoint_write_s": CHARGED_SAVE.duration_s,
        "hourly_checkpoint_share": CHARGED_SAVE.duration_s / 3600,
        "scales": [asdict(row) for row in scale_table()],
        "losses": [asdict(row) | {"ratio": row.ratio} for row in loss_table()],
        "steps": [asdict(row) | {"efficiency": row.efficiency} for row in sweep_table()],
        "exercises": [asdict(exercise) for exercise in exercises()],
        "contradictions": list(contradictions()),
    }


if __name__ == "__main__":
    TUTORIAL.write_text(json.dumps(answer(), indent=2) + "\n", encoding="utf-8")
