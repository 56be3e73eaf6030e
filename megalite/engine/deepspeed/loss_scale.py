"""fp16's loss scale: read, restored, and kept on the device where the device decides about steps.

Depends on DeepSpeed 0.19.8's runtime/fp16/loss_scaler.py, whose `DynamicLossScaler` is the attribute `loss_scaler` of
ZeRO's optimizers; BF16_Optimizer has none. A test in test_loss_scale.py fails when it moves otherwise than ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # all that changes in a `DynamicLossScaler`


class DeviceLossScaler:
    """Takes the place of a `DynamicLossScaler` and moves as that does, by an overflow that only the device knows."""

    dynamic = True

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self._rules, self.min_scale = scaler, scaler.min_scale
        state = [float(getattr(scaler, name)) for name in FIELDS]
        self.restore(torch.tensor(state, dtype=torch.float64, device=device))

    def restore(self, state: Tensor) -> None:
        """Takes another state: `FIELDS`, float64. It is replaced, never written to, so that who read it keeps it."""
        self.state = state
        self.cur_scale = state[0].float()  # a factor in fp64 would widen the loss

    @property
    def loss_scale(self) -> Tensor:
        """The scale, under the other name that DeepSpeed has for it."""
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss times the scale; `engine.backward` calls it."""
        return loss * self.cur_scale

    def update_scale(self, overflow: Tensor | bool, is_held: Tensor | None = None) -> None:
        """Moves the scale behind a step; where `is_held` is 1 the step will be done again, and it stays."""
        if not isinstance(overflow, Tensor):
            overflow = torch.full((), overflow, device=self.state.device)
        rules, (scale, step, last_overflow, patience) = self._rules, self.state
        is_last = patience <= (1 if rules.delayed_shift > 1 else torch.inf)
        lowered = torch.where(is_last, (scale / rules.scale_factor).clamp(min=rules.min_scale), scale)
        after_overflow = (lowered, step + 1, step, torch.where(is_last, patience, patience - 1))
        good = step - last_overflow - 1  # steps since
        is_raised = (good > 0) & (good % rules.scale_window == 0)
        raised = torch.where(is_raised, scale * rules.scale_factor, scale)
        refilled = is_raised | rules.consecutive_hysteresis
        after_step = (raised, step + 1, last_overflow, torch.where(refilled, rules.delayed_shift, patience))
        state = torch.where(overflow, torch.stack(after_overflow), torch.stack(after_step))
        self.restore(state if is_held is None else torch.where(is_held.bool(), self.state, state))


def keep_loss_scale_on_device(engine: Any) -> None:
    """Makes the device move the loss scale of an engine; does nothing without a dynamic one. At the smallest scale it
    raises nothing, as DeepSpeed's does: the guard counts skipped steps.

    Nothing that such an engine still does in a step (`scale_if_loss` of runtime/base_optimizer.py, `_update_scale` of
    runtime/zero/stage_1_and_2.py) looks at the scale's number.
    """
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        engine.optimizer.loss_scaler = DeviceLossScaler(scaler, engine.device)


def loss_scaler_tensor(optimizer: Any) -> Tensor | None:
    """Returns `FIELDS` of fp16's dynamic loss scale, float64, without waiting for a device; None for other precisions.

    A step does not write to it.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    return scaler.state if isinstance(scaler, DeviceLossScaler) else None


def loss_scaler_state(optimizer: Any) -> dict[str, float]:
    """Returns the state of fp16's dynamic loss scale; empty for other precisions. Waits for the device."""
    return named(loss_scaler_tensor(optimizer))


def named(state: Tensor | None) -> dict[str, float]:
    """Returns what `loss_scaler_tensor` returned as `loss_scaler_state` does."""
    return {} if state is None else dict(zip(FIELDS, state.tolist(), strict=True))


def set_loss_scaler_state(optimizer: Any, state: dict[str, float]) -> None:
    """Restores what `loss_scaler_state` returned; does nothing for other precisions."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if isinstance(scaler, DeviceLossScaler):
        known = named(scaler.state)
        values = [state.get(name, known[name]) for name in FIELDS]
        scaler.restore(torch.tensor(values, dtype=torch.float64, device=scaler.state.device))


def can_fall(optimizer: Any, scale: float) -> bool:
    """Returns whether `scale` is above fp16's smallest, so that it may be what made gradients overflow."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return isinstance(scaler, DeviceLossScaler) and bool(scale > scaler.min_scale)
