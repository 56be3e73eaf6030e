"""Reading and writing a training engine's fp32 weights and optimizer moments, one parameter at a time.

Values are whole local parameters (this rank's `Shard`) in fp32, whatever the ZeRO stage. Uses DeepSpeed's public
fragment API; every function is collective over the data-parallel group unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from megalite.engine.deepspeed.internals import (
    is_partitioned,
    is_swapped,
    link_optimizer_state,
    own_range,
    owned_fp32_values,
    unreplicated_partition,
)
from megalite.engine.deepspeed.step import current_loss_scale, flat_partitions
from megalite.engine.engine import Engine
from megalite.engine.optimizers.adamw import CompactAdamW
from megalite.engine.optimizers.build import MOMENTS
from megalite.engine.reduction.gradient_reduction import GradientReducer


def moment_names(engine: Engine) -> tuple[str, ...]:
    """Returns the names of the optimizer's state tensors and makes them readable; empty before its first step.

    Single parameters may have others: `optimizers.moments_of`.
    """
    states = [engine.torch_optimizer.state.get(flat) for flat in flat_partitions(engine.deepspeed.optimizer)]
    if not all(states):
        return ()
    link_optimizer_state(engine.deepspeed.optimizer)
    return MOMENTS[engine.config.optimizer.name]


def optimizer_step_count(engine: Engine) -> int:
    """Returns the number of steps the optimizer took, skipped ones excluded: Adam's bias correction depends on it."""
    for flat in flat_partitions(engine.deepspeed.optimizer):
        step = engine.torch_optimizer.state.get(flat, {}).get("step")
        if step is not None:
            return int(step)
    return 0


def written_range(parameter: nn.Parameter) -> tuple[int, int]:
    """Returns the range of the flattened local parameter that a load writes on this rank: what its optimizer updates,
    and all of a frozen one, which is in no optimizer."""
    return own_range(parameter) if parameter.requires_grad else (0, parameter.numel())


@torch.no_grad()
def write_own_numbers(parameter: nn.Parameter, kind: str, fill: Callable[[Tensor], object]) -> None:
    """Lets `fill` overwrite this rank's fp32 values of a parameter; `refresh` must follow once all are written.

    `fill` gets a flat tensor of the length of `written_range`, of a frozen parameter in its own format. Not collective.
    """
    start, stop = written_range(parameter)
    if start == stop:
        return
    if not parameter.requires_grad:
        fill(parameter.detach().view(-1))
        return
    if not is_swapped(parameter):
        fill(owned_fp32_values(parameter, kind))
        return
    partition = torch.zeros(parameter.ds_tensor.numel(), device=owned_fp32_values(parameter, kind).device)  # type: ignore[attr-defined]
    fill(partition[: stop - start])
    if kind == "weight":
        safe_set_local_fp32_param(parameter, partition)
    else:
        safe_set_local_optimizer_state(parameter, partition, kind)


def read_parameter(parameter: nn.Parameter, moments: tuple[str, ...]) -> dict[str, Tensor]:
    """Returns `weight` and the given moments of one parameter, fp32, in its local shape."""
    if not parameter.requires_grad:
        return {"weight": parameter.detach().float()}
    tensors = {"weight": safe_get_full_fp32_param(parameter)}
    tensors |= {name: safe_get_full_optimizer_state(parameter, name) for name in moments}
    return {name: tensor.detach().view(parameter.shard.local_shape) for name, tensor in tensors.items()}  # type: ignore[attr-defined]


@contextmanager
def reading_gradients(engine: Engine, take: Callable[[nn.Parameter, Tensor], None]) -> Iterator[None]:
    """Makes every step of the `with` pass each parameter and its gradient to `take` before the optimizer uses it."""
    optimizer = engine.deepspeed.optimizer
    step = optimizer.step

    def read_and_step(*args: Any, **kwargs: Any) -> Any:
        for parameter, gradient in read_gradients(engine):
            take(parameter, gradient)
        return step(*args, **kwargs)

    optimizer.step = read_and_step
    try:
        yield
    finally:
        optimizer.step = step


def read_gradients(engine: Engine) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each parameter and its gradient, between a step's last backward and the optimizer's use of it.

    The gradient is whole (this rank's `Shard`), fp32, averaged over the global batch, neither scaled nor clipped.
    """
    scale = loss_scale(engine)
    for parameter, gradient in whole_gradients(engine.reducer):
        yield parameter, gradient / scale


def whole_gradients(reducer: GradientReducer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each parameter and its whole mean gradient, fp32, in the parameter's shape; collective, behind the
    reducer's `finish`. For tests and reports: one all-reduce per parameter."""
    own = {parameter: (start, part) for parameter, start, part in reducer.own_parts()}
    for bucket in reducer.buckets:
        for one in bucket.slices:
            whole = torch.zeros(one.shape.numel(), device=reducer.device)
            if one.parameter in own:
                start, part = own[one.parameter]
                whole[start : start + len(part)] = part
            if bucket.replicas.size > 1:
                dist.all_reduce(whole, group=bucket.replicas.group)
            yield one.parameter, whole.view(one.shape)


def loss_scale(engine: Engine) -> float:
    """Returns the factor on the gradients of the current step: fp16's loss scale, or 1. Waits for the device."""
    return float(current_loss_scale(engine.deepspeed.optimizer))


def create_moments(engine: Engine, step_count: int) -> None:
    """Creates zero optimizer state, so that moments can be written before the first step."""
    optimizer = engine.torch_optimizer
    is_fused = optimizer.defaults.get("fused")  # then the step counter is beside the parameter
    for flat in flat_partitions(engine.deepspeed.optimizer):
        if isinstance(optimizer, CompactAdamW):
            optimizer.create_state(flat, step_count)
            continue
        state = optimizer.state[flat]
        if isinstance(optimizer, DeepSpeedCPUAdam):
            state["step"] = step_count
        else:
            state["step"] = torch.tensor(float(step_count), device=flat.device if is_fused else "cpu")
        for name in MOMENTS[engine.config.optimizer.name]:
            state[name] = torch.zeros_like(flat)
    link_optimizer_state(engine.deepspeed.optimizer)


def write_weight(parameter: nn.Parameter, value: Tensor) -> None:
    """Overwrites this rank's part of the fp32 weight from a whole local value; `refresh` must follow."""
    start, stop = written_range(parameter)
    write_own_numbers(parameter, "weight", lambda own: own.copy_(value.flatten()[start:stop]))


@torch.no_grad()
def refresh(engine: Engine) -> None:
    """Copies the written fp32 weights to the compute weights of all ranks; collective."""
    partitioned = [parameter for _, parameter in engine.parameters() if is_partitioned(parameter)]
    if not partitioned:
        engine.deepspeed.optimizer.update_lp_params()
    for parameter in partitioned:  # ZeRO-3 has no such function: its copies are next refreshed by a step
        partition = unreplicated_partition(parameter)
        if partition is not None:
            partition.copy_(owned_fp32_values(parameter, "weight"))
            continue
        value = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(value.view(parameter.shape))
    if engine.tied_weight is not None:
        engine.tied_weight.share()
