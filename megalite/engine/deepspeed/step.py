"""Uses of private parts of DeepSpeed that a step enters, each with the file of DeepSpeed 0.19.8 that it depends on.

A test in test_internals.py fails when such a part moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megalite.engine.deepspeed.loss_scale import DeviceLossScaler

FLAT_PARTITIONS = (
    "single_partition_of_fp32_groups",  # DeepSpeedZeroOptimizer, runtime/zero/stage_1_and_2.py
    "fp32_groups_flat_partition",  # BF16_Optimizer, runtime/bf16_optimizer.py
    "fp32_partitioned_groups_flat",  # DeepSpeedZeroOptimizer_Stage3, runtime/zero/stage3.py
)


def flat_partitions(optimizer: Any) -> list[torch.Tensor]:
    """Returns the flat fp32 partitions that the torch optimizer updates on this rank, one per parameter group."""
    for name in FLAT_PARTITIONS:
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    raise AssertionError(f"{type(optimizer).__name__} holds none of {FLAT_PARTITIONS}: DeepSpeed has renamed it")


def backward(engine: Any, loss: torch.Tensor) -> None:
    """Runs backward from a scalar that a forward of the engine has returned; its gradient is not divided by anything.

    Times one: DeepSpeed 0.19.8's hook on the engine's own output divides by the number of micro-batches before the one
    that would keep it from that (runtime/engine.py).
    """
    engine.backward(loss * 1.0, scale_wrt_gas=False)


def clear_gradient_partitions(optimizer: Any) -> None:
    """Clears what a step before may have left of its gradients, to which the next one would add.

    `partition_grads` (runtime/zero/stage3.py) overwrites gradients in the first backward of a step and adds to them in
    the others: a parameter that the first one does not touch would keep the gradient of the step before.
    """
    for partition in getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}).values():
        partition.zero_()


def current_loss_scale(optimizer: Any) -> torch.Tensor | float:
    """Returns the factor on the gradients of the current step, on the device if it is kept there: 1 without fp16."""
    scale: torch.Tensor | float = getattr(optimizer, "loss_scale", 1.0)  # BF16_Optimizer has none
    return scale if isinstance(scale, torch.Tensor) else float(scale)


def takes_step(optimizer: Any, norm: torch.Tensor, norm_on_host: float) -> bool:
    """Decides by the gradients' norm whether a step on our gradients is taken, where DeepSpeed's own step does, so that
    a gate is asked too; records the norm, infinite if not.

    It is of the gradients without fp16's loss scale, which is updated.
    """
    optimizer.overflow = not math.isfinite(norm_on_host)
    optimizer._update_scale(optimizer.overflow)
    optimizer._global_grad_norm = float("inf") if optimizer.overflow else norm
    return not optimizer.overflow


def leave_to_device(optimizer: Any, norm: torch.Tensor, overflow: torch.Tensor, is_held: torch.Tensor) -> None:
    """Records the norm of a step about which the device decides: DeepSpeed's step sees one that is taken.

    fp16's loss scale moves by `overflow`, unless `is_held` says that the step will be done again.
    """
    optimizer.overflow, optimizer._global_grad_norm = False, norm
    if isinstance(scaler := getattr(optimizer, "loss_scaler", None), DeviceLossScaler):
        scaler.update_scale(overflow, is_held)


@contextmanager
def asking_first(optimizer: Any, refuses: Callable[[bool], bool]) -> Iterator[None]:
    """Makes steps of the `with` ask `refuses`, given whether the gradients are not finite, before weights change.

    DeepSpeed offers no callback between its check for overflow and the update, so the function is replaced that every
    step calls there: `_update_scale` of DeepSpeedZeroOptimizer and DeepSpeedZeroOptimizer_Stage3
    (runtime/zero/stage_1_and_2.py and stage3.py), which look at `overflow` after it. `takes_step` calls it too.
    """
    update_scale = optimizer._update_scale

    def ask_or_update(has_overflow: bool = False) -> None:
        if refuses(has_overflow):
            optimizer.overflow = True
        else:
            update_scale(has_overflow)

    optimizer._update_scale = ask_or_update
    try:
        yield
    finally:
        optimizer._update_scale = update_scale
