"""Builds the table of a run's layout, from the same layer specs that ranks are built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from launch.output import Table
from megalite.config import Config, ResolvedLayout
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.mesh import Mesh, stage_boundaries
from models.decoder import decoder_layers


@dataclass(frozen=True)
class RankRow:
    """The coordinates of one rank, and the layers and parameters that it holds."""

    rank: int
    stage: int
    data_rank: int
    tensor_rank: int
    layers: tuple[str, ...]
    parameters: int  # held on this rank before ZeRO partitions them, padding included


def layout_rows(config: Config, layout: ResolvedLayout) -> list[RankRow]:
    """Builds one row per rank. Layers are built on the meta device, so sizes are exact and take no memory."""
    mesh = Mesh(layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size)
    specs = decoder_layers(config.model)
    boundaries = stage_boundaries(
        [spec.cost for spec in specs], [spec.is_block for spec in specs], mesh.pipeline_parallel_size
    )
    loads: dict[tuple[int, int], int] = {}
    for stage in range(mesh.pipeline_parallel_size):
        local = specs[boundaries[stage] : boundaries[stage + 1]]
        once = {spec.module_key: spec for spec in local}.values()  # a tied head on its embedding's stage adds nothing
        for tensor_rank in range(mesh.tensor_parallel_size):
            tp = TensorParallel(mesh.tensor_parallel_size, tensor_rank)
            with torch.device("meta"):
                loads[stage, tensor_rank] = sum(p.numel() for spec in once for p in spec.build(tp).parameters())
    rows = []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        names = tuple(spec.name for spec in specs[boundaries[at.pipeline_rank] : boundaries[at.pipeline_rank + 1]])
        load = loads[at.pipeline_rank, at.tensor_rank]
        rows.append(RankRow(rank, at.pipeline_rank, at.data_rank, at.tensor_rank, names, load))
    return rows


def layout_table(rows: list[RankRow], layout: ResolvedLayout) -> Table:
    """Builds a table of the rows."""
    return Table(
        ("rank", "stage", "data", "tensor", "layers", "parameters"),
        [
            (
                str(row.rank),
                str(row.stage),
                str(row.data_rank),
                f"{row.tensor_rank} of {layout.tensor_parallel_size}",
                _layer_span(row.layers),
                f"{row.parameters:,}",
            )
            for row in rows
        ],
        title=f"tensor {layout.tensor_parallel_size} x pipeline {layout.pipeline_parallel_size} x data "
        f"{layout.data_parallel_size}, ZeRO-{layout.zero_stage}, "
        f"{layout.gradient_accumulation_steps} micro-batches per step",
        text_columns=(4,),
    )


def _layer_span(names: tuple[str, ...]) -> str:
    """Layer names in short, such as `embed_tokens, layers 0-3, norm`."""
    short = [name.removeprefix("model.") for name in names]
    places = [place for place, name in enumerate(short) if name.startswith("layers.")]
    first, last = places[0], places[-1]
    numbers = [short[place].removeprefix("layers.") for place in (first, last)]
    span = f"layers {numbers[0]}-{numbers[1]}" if last > first else f"layer {numbers[0]}"
    return ", ".join([*short[:first], span, *short[last + 1 :]])
