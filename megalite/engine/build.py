"""Builds the engine for a layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megalite.config import Config, ResolvedLayout
from megalite.engine.activity import Activity
from megalite.engine.distributed import share_timeout
from megalite.engine.engine import Engine, PlainEngine
from megalite.engine.pipelined import PipelinedEngine
from megalite.parallel.layers import LayerSpec
from megalite.parallel.mesh import Mesh


def build_engine(
    specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, activity: Activity | None = None
) -> Engine:
    """Builds the engine for `layout`. torch.distributed must have been started with `layout.world_size` ranks.

    The engine records its operations in `activity`, by default one of its own.
    """
    mesh = Mesh.of(layout)
    kind = PipelinedEngine if mesh.pipeline_parallel_size > 1 else PlainEngine
    engine = kind(specs, config, layout, mesh, activity or Activity(mesh, dist.get_rank()))
    share_timeout()
    return engine
