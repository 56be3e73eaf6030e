"""Reading and writing a training engine's fp32 weights and optimizer moments, one parameter at a time.

In and out: whole local parameters (this rank's `Shard`), fp32, whatever ZeRO stage cuts them further. Goes through
DeepSpeed's public fragment API; every function is collective over the data-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from megalite.engine.engine import Engine
from megalite.engine.optimizer import MOMENTS
from megalite.engine.seams import (
    flat_partitions,
    is_partitioned,
    is_swapped,
    link_optimizer_state,
    lone_partition,
    own_numbers,
    own_partition,
    own_range,
)


def moment_names(engine: Engine) -> tuple[str, ...]:
    """The optimizer's state tensors, made readable by `read_parameter`; none before its first step."""
    states = [engine.torch_optimizer.state.get(flat) for flat in flat_partitions(engine.deepspeed.optimizer)]
    if not all(states):
        return ()
    link_optimizer_state(engine.deepspeed.optimizer)
    return MOMENTS[engine.config.optimizer.name]


def optimizer_step_count(engine: Engine) -> int:
    """How many steps the optimizer took: Adam's bias correction; skipped steps are not among them."""
    for flat in flat_partitions(engine.deepspeed.optimizer):
        step = engine.torch_optimizer.state.get(flat, {}).get("step")
        if step is not None:
            return int(step)
    return 0


@torch.no_grad()
def write_own_numbers(parameter: nn.Parameter, kind: str, fill: Callable[[Tensor], None]) -> None:
    """Lets `fill` overwrite this rank's fp32 numbers of a parameter; `refresh` must follow once all are written.

    `fill` gets a flat tensor of the length of `own_range`. Not collective.
    """
    start, stop = own_range(parameter)
    if start == stop:
        return
    if not is_swapped(parameter):
        fill(own_numbers(parameter, kind))
        return
    partition = torch.zeros(parameter.ds_tensor.numel(), device=own_numbers(parameter, kind).device)  # type: ignore[attr-defined]
    fill(partition[: stop - start])
    if kind == "weight":
        safe_set_local_fp32_param(parameter, partition)
    else:
        safe_set_local_optimizer_state(parameter, partition, kind)


def read_parameter(parameter: nn.Parameter, moments: tuple[str, ...]) -> dict[str, Tensor]:
    """`weight` and the given moments of one parameter, fp32, in its local shape."""
    tensors = {"weight": safe_get_full_fp32_param(parameter)}
    tensors |= {name: safe_get_full_optimizer_state(parameter, name) for name in moments}
    return {name: tensor.detach().view(parameter.shard.local_shape) for name, tensor in tensors.items()}  # type: ignore[attr-defined]


@contextmanager
def reading_gradients(engine: Engine, take: Callable[[nn.Parameter, Tensor], None]) -> Iterator[None]:
    """While it is open, every step hands `take` each parameter and its gradient before the optimizer uses it."""
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
    """Each parameter and its gradient, between a step's last backward and the optimizer's use of it.

    The gradient is whole (this rank's `Shard`), fp32, averaged over the global batch, neither scaled nor clipped.
    """
    scale = getattr(engine.deepspeed.optimizer, "loss_scale", 1.0)  # BF16_Optimizer has none
    for _, parameter in engine.parameters():
        # with a `grad` there the accessor returns it; ZeRO-1 has reduced only this rank's partition of it
        own, parameter.grad = parameter.grad, None
        gradient = safe_get_full_grad(parameter)
        parameter.grad = own
        yield parameter, gradient.detach().float().view(parameter.shard.local_shape) / scale  # type: ignore[attr-defined]


def create_moments(engine: Engine, step_count: int) -> None:
    """Makes empty optimizer state, so that moments can be written before the first step."""
    for flat in flat_partitions(engine.deepspeed.optimizer):
        state = engine.torch_optimizer.state[flat]
        state["step"] = torch.tensor(float(step_count), device=_step_device(engine, flat))
        for name in MOMENTS[engine.config.optimizer.name]:
            state[name] = torch.zeros_like(flat)
    link_optimizer_state(engine.deepspeed.optimizer)


def forget_moments(engine: Engine) -> None:
    """Makes an optimizer that has stepped one that has not."""
    engine.torch_optimizer.state.clear()


def _step_device(engine: Engine, flat: Tensor) -> torch.device:
    """A fused optimizer keeps its step counter beside the parameter."""
    return flat.device if engine.torch_optimizer.defaults.get("fused") else torch.device("cpu")


@torch.no_grad()
def write_parameter(parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> None:
    """Overwrites the fp32 weight and the given moments from whole local values; `refresh` must follow."""
    for name, tensor in tensors.items():
        value = tensor.to(torch.float32)
        if is_partitioned(parameter):
            _write_partition(parameter, name, value)
        elif name == "weight":
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, name)


def _write_partition(parameter: nn.Parameter, name: str, value: Tensor) -> None:
    """The same for ZeRO-3."""
    mine = own_partition(parameter, value)
    if name == "weight":
        safe_set_local_fp32_param(parameter, mine)
    else:
        safe_set_local_optimizer_state(parameter, mine, name)


@torch.no_grad()
def refresh(engine: Engine) -> None:
    """Carries the written fp32 weights to the compute copies of all ranks; collective."""
    parameters = [parameter for _, parameter in engine.parameters()]
    if not any(map(is_partitioned, parameters)):
        engine.deepspeed.optimizer.update_lp_params()
        return
    for parameter in parameters:  # ZeRO-3 has no such function: its copies are next refreshed by a step
        partition = lone_partition(parameter)
        if partition is not None:
            partition.copy_(own_numbers(parameter, "weight"))
            continue
        value = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(value.view(parameter.shape))
