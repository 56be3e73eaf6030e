"""Builds the engine for a layout."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from pydantic import ValidationError

from megalite.config import Config, ConfigError, ResolvedLayout
from megalite.config.rules.float8 import check_float8_package
from megalite.engine.deepspeed.process_groups import share_timeout
from megalite.engine.engine import Engine
from megalite.engine.pipeline.pipelined import PipelinedEngine
from megalite.engine.plain import PlainEngine
from megalite.parallel.float8 import check_float8_device
from megalite.parallel.layers import LayerSpec
from megalite.parallel.mesh import Mesh
from megalite.tracing.activity import Activity

log = logging.getLogger(__name__)


def build_engine(
    specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, activity: Activity | None = None
) -> Engine:
    """Builds the engine for `layout`. torch.distributed must have been started with `layout.world_size` ranks.

    The engine records its operations in `activity`, by default one of its own. Raises ConfigError where DeepSpeed
    refuses a value of the section `deepspeed`.
    """
    _check_float8(config)
    mesh = Mesh.of(layout)
    kind = PipelinedEngine if mesh.pipeline_parallel_size > 1 else PlainEngine
    try:
        engine = kind(specs, config, layout, mesh, activity or Activity(mesh, dist.get_rank()))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"]))
        raise ConfigError(f"section deepspeed: DeepSpeed refuses {option}: {first['msg']}: correct it") from None
    share_timeout()
    return engine


def _check_float8(config: Config) -> None:
    """Raises ConfigError where torchao is missing or this rank's GPU has no float8; says where it is emulated."""
    recipe = config.precision.float8
    check_float8_package(config)
    if recipe == "none":
        return
    how = "emulated on the CPU by fp32 products of rounded numbers, which is slower"
    if torch.cuda.is_initialized():
        check_float8_device(recipe, torch.cuda.get_device_capability(), torch.cuda.get_device_name())
        how = f"products of attention and MLP; predictions are those of {config.precision.dtype} alone"
    if dist.get_rank() == 0:
        log.info(f"precision.float8 {recipe}: {how}")
