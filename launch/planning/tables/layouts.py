"""The result of a layout search as rows of a table, CSV and JSON. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from launch.output import Table
from megalite.planner.explanation import explain
from megalite.planner.hardware import Cluster, is_guess
from megalite.planner.layout_choice import doubts
from megalite.planner.longest_context import ContextLength
from megalite.planner.search import LayoutCandidate, SearchResult
from megalite.planner.workload import recompute_in_short
from megalite.units import GIB, plural

LayoutRow = dict[str, Any]
"""One layout with its predicted figures; the keys are the columns of the CSV output."""


def row_of(candidate: LayoutCandidate, cluster: Cluster, rank: int | None) -> LayoutRow:
    """Builds the row of one layout. `rank`: 1 for the fastest; None for the config's own layout."""
    layout, time = candidate.layout, candidate.time
    bubble = sum(size for name, size in time.parts.items() if "bubble" in name)
    return {
        "rank": rank,
        "layout": str(layout),
        "accelerators": layout.world_size,
        **asdict(layout),
        "recompute": recompute_in_short(layout.recompute),
        "micro_batches": candidate.job.micro_batches,
        "memory_gib": candidate.fullest.total / GIB,  # of the fullest accelerator
        "host_memory_gib": candidate.fullest.on_host / GIB,  # of what it has offloaded
        "memory_used": candidate.fullest.total / cluster.memory_bytes,  # share of an accelerator's memory
        "step_s": time.seconds,
        "tokens_per_s": candidate.tokens_per_s,
        "tokens_per_s_per_accelerator": candidate.tokens_per_s / layout.world_size,
        "model_flops_utilization": time.model_flops_utilization,  # None on a CPU
        "bubble": bubble / time.seconds,  # share of the step
        "doubts": "; ".join(doubts(candidate, cluster.memory_bytes)),  # what the figures rest on that may not hold
    }


def rows_of(result: SearchResult, own: LayoutRow | None, top: int) -> list[LayoutRow]:
    """The row of the config's own layout first, then the one to take and the fastest ones."""
    best = [row_of(one, result.cluster, place) for place, one in enumerate(result.candidates[:top], 1)]
    return [*([own] if own is not None else []), *best]


def layouts_table(rows: Sequence[LayoutRow], result: SearchResult) -> Table:
    """Builds the table of the layouts that fit."""
    count, figures = len(result.candidates), 2 if is_guess(result.cluster.accelerator) else 3
    columns = {
        "": "{rank}",
        "layout": "{layout}",
        "GiB": "{memory_gib:.3g}",
        "host GiB": "{host_memory_gib:.3g}",
        "s/step": f"{{step_s:.{figures}g}}",
        "tokens/s": "{tokens}",
        "MFU": "{model_flops_utilization:.1%}",
        "bubble": "{bubble:.1%}",
        "doubts": "{doubts}",
    }
    if not any(row["doubts"] for row in rows):
        del columns["doubts"]
    if not any(row["host_memory_gib"] for row in rows):
        del columns["host GiB"]
    if result.cluster.accelerator.device == "cpu":
        del columns["MFU"]
    texts = [
        {
            "rank": row["rank"] or "as written",
            "layout": row["layout"] + ", does not fit" * (row["memory_used"] > 1),
            "tokens": f"{float(format(row['tokens_per_s'], f'.{figures}g')):,.0f}"
            if figures < 3
            else f"{row['tokens_per_s']:,.0f}",
        }
        for row in rows
    ]
    return Table.of(
        [row | text for row, text in zip(rows, texts, strict=True)],
        columns,
        title=f"{plural(count, 'layout')} that fit: the one to take, then fastest first; an accelerator has "
        f"{result.cluster.accelerator.memory_gib:.3g} GiB",
        text_columns=(0, 1),
    )


def context_rows(lengths: Sequence[ContextLength], cluster: Cluster) -> list[LayoutRow]:
    """The row of the layout to take for each length of sequences."""
    return [
        {"sequence_length": one.length, "sequences": one.best.job.global_batch_size, **row_of(one.best, cluster, None)}
        for one in lengths
        if one.best is not None
    ]


def contexts_table(lengths: Sequence[ContextLength], cluster: Cluster) -> Table:
    """Builds the table of the longest sequences that fit."""
    columns = {
        "sequence\nlength": "{sequence_length:,}",
        "sequences\nof a step": "{sequences:,}",
        "layout": "{layout}",
        "GiB": "{memory_gib:.3g}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "MFU": "{model_flops_utilization:.1%}",
    }
    if cluster.accelerator.device == "cpu":
        del columns["MFU"]
    title = "longest sequences that fit; a step has no more tokens, or one sequence for each replica"
    return Table.of(context_rows(lengths, cluster), columns, title=title, text_columns=(2,))


def search_as_json(
    result: SearchResult, run: dict[str, Any], own: LayoutRow | None, own_problem: str | None, top: int
) -> dict[str, Any]:
    """The whole result for `--json`; `run`: the length, price and checkpoints of the best layout's run."""
    return {
        "cluster": result.cluster.model_dump(mode="json"),
        "run": run,
        "as_written": own,
        "as_written_problem": own_problem,
        "layouts": [
            {
                **row_of(one, result.cluster, place),
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
