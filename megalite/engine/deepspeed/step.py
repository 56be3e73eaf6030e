"""Uses of private parts of DeepSpeed that a step enters, each with the file of DeepSpeed 0.19.8 that it depends on.

A test in test_internals.py fails when such a part moves.
"""

from __future__ import annotations

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


def current_loss_scale(optimizer: Any) -> torch.Tensor | float:
    """Returns the factor on the gradients of the current step, on the device if it is kept there: 1 without fp16."""
    scale: torch.Tensor | float = getattr(optimizer, "loss_scale", 1.0)  # BF16_Optimizer has none
    return scale if isinstance(scale, torch.Tensor) else float(scale)


def takes_step(optimizer: Any, norm: torch.Tensor, *, is_finite: bool, is_refused: bool = False) -> bool:
    """Records what the host has decided about a step: whether it is taken, which it returns, and the norm, infinite if
    not. fp16's loss scale moves, unless the step is refused."""
    optimizer.overflow = is_refused or not is_finite
    if not is_refused and (scaler := getattr(optimizer, "loss_scaler", None)) is not None:  # BF16_Optimizer has none
        scaler.update_scale(not is_finite)
    optimizer._global_grad_norm = float("inf") if optimizer.overflow else norm
    return not optimizer.overflow


def leave_to_device(optimizer: Any, norm: torch.Tensor, overflow: torch.Tensor, is_held: torch.Tensor) -> None:
    """Records the norm of a step about which the device decides: DeepSpeed's step sees one that is taken.

    fp16's loss scale moves by `overflow`, unless `is_held` says that the step will be done again.
    """
    optimizer.overflow, optimizer._global_grad_norm = False, norm
    if isinstance(scaler := getattr(optimizer, "loss_scaler", None), DeviceLossScaler):
        scaler.update_scale(overflow, is_held)
