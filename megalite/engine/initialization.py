"""Makes DeepSpeed's engine and the torch optimizer of a rank's modules."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from pydantic import ValidationError

from megalite.config import Config, ConfigError, ResolvedLayout
from megalite.engine.compilation import compile_blocks
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.engine.deepspeed.internals import accept_fp16_on_cpus, quiet_stdout, share_fp32_weights
from megalite.engine.deepspeed.loss_scale import stay_at_smallest_loss_scale
from megalite.engine.deepspeed.process_groups import Grid, group_timeout
from megalite.engine.optimizers.build import build_optimizer
from megalite.engine.optimizers.cpu_adam import BUILD_LIMIT, why_no_cpu_adam
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import named_shards

log = logging.getLogger(__name__)


def initialize(
    model: torch.nn.Module, config: Config, layout: ResolvedLayout, grid: Grid, tp: TensorParallel
) -> tuple[Any, torch.optim.Optimizer]:
    """Returns DeepSpeed's engine of a model and its torch optimizer; collective.

    Raises ConfigError where DeepSpeed refuses a value of the section `deepspeed`.
    """
    compile_blocks(model, config, torch.device(get_accelerator().current_device_name()), tp)
    for _, parameter in named_shards(model):
        # DeepSpeed's norm counts an unmarked parameter on tensor-parallel rank 0 only, a marked one on every rank
        parameter.tensor_model_parallel = not parameter.shard.is_replicated  # type: ignore[attr-defined]
    optimizer = build_optimizer(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        config.optimizer,
        bucket_size=config.parallel.gradient_bucket_size if config.reduces_beside_backward else None,
        has_cpu_adam=_has_cpu_adam(config),
    )
    options = deepspeed_config(config, layout)
    if config.precision.dtype == "fp16":
        accept_fp16_on_cpus()
    try:
        with quiet_stdout():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, mpu=grid, config=options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"]))
        raise ConfigError(f"section deepspeed: DeepSpeed refuses {option}: {first['msg']}: correct it") from None
    share_fp32_weights(engine.optimizer)
    stay_at_smallest_loss_scale(engine.optimizer)
    return engine, optimizer


def _has_cpu_adam(config: Config) -> bool:
    """Returns whether the optimizer is DeepSpeed's Adam for the CPU; says so, or why it is torch's. Collective."""
    if config.offload.optimizer == "none" or config.optimizer.name != "adamw":
        return False
    reason = why_no_cpu_adam(min(BUILD_LIMIT, group_timeout() / 2))
    if dist.get_rank() == 0:
        chosen = "DeepSpeed's Adam for the CPU"
        if reason is not None:
            chosen = f"torch's fused AdamW on the CPU, as DeepSpeed's is not usable: {reason}"
        log.info(f"offload.optimizer cpu: the update is {chosen}")
    return reason is None
