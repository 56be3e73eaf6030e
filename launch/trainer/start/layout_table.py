"""Builds the table of a run's layout, from the same layer specs that ranks are built from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from launch.output import Table
from megalite.config import Config, ResolvedLayout
from megalite.parallel.collectives import RankGroup, TensorParallel
from megalite.parallel.layers import LayerSpec
from megalite.parallel.mesh import Mesh, stage_boundaries
from megalite.schedules.tables import Schedule, placement
from models.decoder import layers_of


@dataclass(frozen=True)
class RankRow:
    """The coordinates of one rank, and the layers and parameters that it holds."""

    rank: int
    stage: int
    data_rank: int
    context_rank: int
    tensor_rank: int
    layers: tuple[str, ...]
    parameters: int  # held on this rank before ZeRO partitions them, padding included


def layout_rows(config: Config, layout: ResolvedLayout) -> list[RankRow]:
    """Builds one row per rank. Layers are built on the meta device, so sizes are exact and take no memory."""
    mesh = Mesh.of(layout)
    specs = layers_of(config, ["none"] * config.model.num_hidden_layers)
    where = placement(Schedule(layout.pipeline_schedule), layout.pipeline_parallel_size, layout.pipeline_chunks)
    boundaries = stage_boundaries([spec.cost for spec in specs], [spec.is_block for spec in specs], len(where))
    by_stage: list[list[LayerSpec]] = [[] for _ in range(layout.pipeline_parallel_size)]
    for stage, (first, end) in zip(where, pairwise(boundaries), strict=True):
        by_stage[stage] += specs[first:end]
    tied = specs[-1].module_key  # the head on another stage than its embedding holds no parameter
    loads: dict[tuple[int, int], int] = {}
    for stage, local in enumerate(by_stage):
        has_copy = specs[-1].tied_to is not None and stage == where[-1] != where[0]
        once = {spec.module_key: spec for spec in local if not (has_copy and spec.module_key == tied)}.values()
        for tensor_rank in range(mesh.tensor_parallel_size):
            tp = TensorParallel(mesh.tensor_parallel_size, tensor_rank, experts=RankGroup(mesh.expert_parallel_size))
            with torch.device("meta"):
                loads[stage, tensor_rank] = sum(p.numel() for spec in once for p in spec.build(tp).parameters())
    rows = []
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        names = tuple(spec.name for spec in by_stage[at.pipeline_rank])
        load = loads[at.pipeline_rank, at.tensor_rank]
        rows.append(RankRow(rank, at.pipeline_rank, at.data_rank, at.context_rank, at.tensor_rank, names, load))
    return rows


def layout_table(rows: list[RankRow], layout: ResolvedLayout) -> Table:
    """Builds a table of the rows."""
    schedule = f" ({layout.pipeline_schedule})" if layout.pipeline_schedule != "1f1b" else ""
    cp = layout.context_parallel_size
    shared = f" x context {cp} ({layout.context_parallel_kind})" if cp > 1 else ""
    return Table(
        ("rank", "stage", "data", *(["context"] if cp > 1 else []), "tensor", "layers", "parameters"),
        [
            (
                str(row.rank),
                str(row.stage),
                str(row.data_rank),
                *([f"{row.context_rank} of {cp}"] if cp > 1 else []),
                f"{row.tensor_rank} of {layout.tensor_parallel_size}",
                _layer_span(row.layers),
                f"{row.parameters:,}",
            )
            for row in rows
        ],
        title=f"tensor {layout.tensor_parallel_size} x pipeline {layout.pipeline_parallel_size}{schedule} x data "
        f"{layout.data_parallel_size}{shared}, ZeRO-{layout.zero_stage}, "
        f"{layout.gradient_accumulation_steps} micro-batches per step",
        text_columns=(4 + (cp > 1),),
    )


def _layer_span(names: tuple[str, ...]) -> str:
    """Layer names in short, such as `embed_tokens, layers 0-3, norm`."""
    parts: list[str] = []
    numbers: list[int] = []  # of blocks in a row
    for name in (*names, ""):
        short = name.removeprefix("model.")
        number = int(short.removeprefix("layers.")) if short.startswith("layers.") else None
        if numbers and number != numbers[-1] + 1:
            first, last = numbers[0], numbers[-1]
            parts.append(f"layers {first}-{last}" if last > first else f"layer {first}")
            numbers = []
        if number is not None:
            numbers.append(number)
        elif short:
            parts.append(short)
    return ", ".join(parts)
