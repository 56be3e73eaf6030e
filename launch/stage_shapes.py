"""What each pipeline stage of a run holds, counted from the layer specs that ranks are built from: the planner's
input."""

from __future__ import annotations

from megalite.config import Config, ResolvedLayout
from megalite.planner.volumes import StageShape, Traffic, traffic, volumes


def stage_shapes(config: Config, layout: ResolvedLayout) -> tuple[StageShape, ...]:
    """One per stage, in order. Imports torch, allocates nothing."""
    from launch.layout_table import layout_rows

    first_ranks = {row.stage: row for row in reversed(layout_rows(config, layout))}
    last = layout.pipeline_parallel_size - 1
    return tuple(
        StageShape(
            parameters=row.parameters,
            blocks=sum(name.startswith("model.layers.") for name in row.layers),
            has_embedding=stage == 0,
            has_head=stage == last,
        )
        for stage, row in sorted(first_ranks.items())
    )


def traffic_of(config: Config, layout: ResolvedLayout) -> Traffic:
    """Bytes over each link of the layout's groups in one optimizer step."""
    return traffic(volumes(config, layout, stage_shapes(config, layout)), layout)
