"""Makes the layers of a rank's modules, and DeepSpeed's engine and the torch optimizer for them."""

from __future__ import annotations

import ctypes
import logging
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megalite.config import Config, ResolvedLayout
from megalite.engine.compilation import compile_blocks
from megalite.engine.deepspeed.config import deepspeed_config
from megalite.engine.deepspeed.internals import (
    accept_fp16_on_cpus,
    dealt_groups_cut_over,
    keep_apart,
    share_fp32_weights,
)
from megalite.engine.deepspeed.process_groups import Grid, group_timeout
from megalite.engine.optimizers.build import build_optimizer
from megalite.engine.optimizers.cpu_adam import BUILD_LIMIT, why_no_cpu_adam
from megalite.engine.stages import TORCH_DTYPES
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, make_layer, named_shards

log = logging.getLogger(__name__)


class LayerMaker:
    """Makes layers where they train: on this rank's device, in `precision.dtype`, and under ZeRO-3 in partitions.

    DeepSpeed would do it with the whole model. So never more than a parameter is in fp32, and a layer in one piece.
    """

    def __init__(self, config: Config, layout: ResolvedLayout, grid: Grid) -> None:
        self._config, self._layout, self._grid = config, layout, grid
        self._partitioned: torch.nn.Parameter | None = None

    def __call__(self, spec: LayerSpec, tp: TensorParallel) -> torch.nn.Module:
        """Returns a layer with its initial weights; collective over the replicas under ZeRO-3."""
        config, dtype = self._config, TORCH_DTYPES[self._config.precision.dtype]

        def place(parameter: torch.nn.Parameter) -> None:  # rounded on the host, which leaves less to transfer
            parameter.data = parameter.data.to(dtype).to(get_accelerator().current_device_name())

        make = partial(make_layer, seed=config.training.seed, initializer_range=config.model.initializer_range)
        if spec.forward is not None:  # a tied head, whose weight is that of another layer, or becomes a `TiedHead`
            return make(spec, tp)
        layer = make(spec, tp, place=place)
        if self._layout.zero_stage == 3 and self._partitioned is None:
            self._partitioned, options = next(layer.parameters()), deepspeed_config(config, self._layout)
            replicas = self._grid.get_data_parallel_group()
            deepspeed.zero.Init(layer, replicas, config_dict_or_path=options, dtype=dtype, mpu=self._grid)
        elif self._partitioned is not None:  # as those before: with the same buffers of what is offloaded to NVMe
            self._partitioned.convert_to_zero_parameters(list(layer.parameters()))  # type: ignore[attr-defined]
        if get_accelerator().device_name() != "cpu":
            ctypes.CDLL(None).malloc_trim(0)  # else what was drawn in fp32 stays with the process: `MALLOC_TUNABLES`
        return layer


def initialize(
    model: torch.nn.Module, config: Config, layout: ResolvedLayout, grid: Grid, tp: TensorParallel
) -> tuple[Any, torch.optim.Optimizer]:
    """Returns DeepSpeed's engine of a model and its torch optimizer; collective."""
    compile_blocks(model, config, torch.device(get_accelerator().current_device_name()), tp)
    for _, parameter in named_shards(model):
        # the norm counts an unmarked parameter on tensor-parallel rank 0 only, a marked one on every rank
        parameter.tensor_model_parallel = not parameter.shard.is_replicated  # type: ignore[attr-defined]
        if parameter.shard.is_dealt:  # type: ignore[attr-defined]
            keep_apart(parameter)
    optimizer = build_optimizer(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        config.optimizer,
        bucket_size=config.parallel.gradient_bucket_size,
        has_cpu_adam=_has_cpu_adam(config),
    )
    options = deepspeed_config(config, layout)
    if config.precision.dtype == "fp16":
        accept_fp16_on_cpus()
    with dealt_groups_cut_over(grid.same_experts_group):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, mpu=grid, config=options)
    if config.compression.weights == "none":  # else the optimizer's are ahead of what replicas have been told
        share_fp32_weights(engine.optimizer)
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
