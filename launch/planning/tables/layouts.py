"""The result of a layout search as rows of a table, CSV and JSON. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.output import Table
from megalite.planner.explanation import explain
from megalite.planner.hardware import Cluster, as_values
from megalite.planner.search import LayoutCandidate, SearchResult
from megalite.planner.units import GIB


@dataclass(frozen=True)
class LayoutRow:
    """One layout with its predicted figures; the fields are the columns of the CSV output."""

    rank: int | None  # 1 is the fastest; None: the config's own
    layout: str
    accelerators: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    zero_stage: int
    sequence_parallel: bool
    recompute: str
    micro_batch_size: int
    micro_batches: int
    memory_gib: float  # of the fullest accelerator
    memory_used: float  # share of an accelerator's memory
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_accelerator: float
    model_flops_utilization: float
    bubble: float  # share of the step

    @property
    def fits(self) -> bool:
        return self.memory_used <= 1


def row_of(candidate: LayoutCandidate, cluster: Cluster, rank: int | None) -> LayoutRow:
    """Builds the row of one layout."""
    layout, time = candidate.layout, candidate.time
    bubble = sum(size for name, size in time.parts.items() if "bubble" in name)
    return LayoutRow(
        rank=rank,
        layout=str(layout),
        accelerators=layout.world_size,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        data_parallel_size=layout.data_parallel_size,
        zero_stage=layout.zero_stage,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        micro_batch_size=layout.micro_batch_size,
        micro_batches=candidate.job.micro_batches,
        memory_gib=candidate.fullest.total / GIB,
        memory_used=candidate.fullest.total / cluster.memory_bytes,
        step_s=time.seconds,
        tokens_per_s=candidate.tokens_per_s,
        tokens_per_s_per_accelerator=candidate.tokens_per_s / layout.world_size,
        model_flops_utilization=time.model_flops_utilization,
        bubble=bubble / time.seconds,
    )


def rows_of(result: SearchResult, own: LayoutRow | None, top: int) -> list[LayoutRow]:
    """The row of the config's own layout first, then the fastest ones."""
    best = [row_of(one, result.cluster, place) for place, one in enumerate(result.candidates[:top], 1)]
    return [*([own] if own is not None else []), *best]


def layouts_table(rows: Sequence[LayoutRow], result: SearchResult) -> Table:
    """Builds the table of the layouts that fit."""
    count = len(result.candidates)
    return Table(
        ("", "layout", "GiB", "s/step", "tokens/s", "MFU", "bubble"),
        [
            (
                "as written" if row.rank is None else str(row.rank),
                row.layout + ("" if row.fits else ", does not fit"),
                f"{row.memory_gib:.3g}",
                f"{row.step_s:.3g}",
                f"{row.tokens_per_s:,.0f}",
                f"{row.model_flops_utilization:.1%}",
                f"{row.bubble:.1%}",
            )
            for row in rows
        ],
        title=f"{count} layout{'s' * (count != 1)} that fit, fastest first; an accelerator has "
        f"{result.cluster.accelerator.memory_gib:.3g} GiB",
        text_columns=(0, 1),
    )


def search_as_json(result: SearchResult, own: LayoutRow | None, own_problem: str | None, top: int) -> dict[str, Any]:
    """The whole result for `--json`."""
    return {
        "cluster": as_values(result.cluster),
        "as_written": None if own is None else asdict(own),
        "as_written_problem": own_problem,
        "layouts": [
            {
                **asdict(row_of(one, result.cluster, place)),
                "step_parts_s": dict(one.time.parts),
                "memory_parts_bytes": [dict(stage.parts) for stage in one.memory],
            }
            for place, one in enumerate(result.candidates[:top], 1)
        ],
        "layouts_found": len(result.candidates),
        "dropped": [
            {
                "layout": str(one.layout),
                "reason": one.reason,
                "missing_gib": None if one.missing_bytes is None else one.missing_bytes / GIB,
            }
            for one in result.dropped
        ],
        "explanation": list(explain(result)),
    }
