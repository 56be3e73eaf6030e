"""The loss scale on the device moves as DeepSpeed's on the host does, and only by steps that are not done again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from hypothesis import given
from hypothesis import strategies as st

from megalite.engine.deepspeed.loss_scale import (
    FIELDS,
    can_fall,
    keep_loss_scale_on_device,
    loss_scaler_state,
    loss_scaler_tensor,
    set_loss_scaler_state,
)
from megalite.engine.deepspeed.step import current_loss_scale


def _optimizer(**rules: Any) -> Any:
    """What has a loss scale of DeepSpeed's, as an optimizer of ZeRO has it."""
    options = {
        "init_scale": 2**9,
        "scale_window": 3,
        "min_scale": 1,
        "delayed_shift": 2,
        "consecutive_hysteresis": False,
    }
    scaler = CreateLossScaler(torch.half, 1.0, True, options | rules)

    class Optimizer(SimpleNamespace):
        loss_scale = property(lambda self: self.loss_scaler.cur_scale)

    optimizer = Optimizer(loss_scaler=scaler)
    scaler.raise_error_at_min_scale = False
    return optimizer


def _on_device(**rules: Any) -> Any:
    optimizer = _optimizer(**rules)
    keep_loss_scale_on_device(SimpleNamespace(optimizer=optimizer, device=torch.device("cpu")))
    return optimizer


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.25, 1, 2**7]),
)
def test_it_moves_as_deepspeeds(
    overflows: list[bool], window: int, patience: int, is_refilled: bool, smallest: float
) -> None:
    """Would catch a rule of another version of DeepSpeed: a run may change its ZeRO stage between sessions."""
    rules = {
        "scale_window": window,
        "delayed_shift": patience,
        "consecutive_hysteresis": is_refilled,
        "min_scale": smallest,
    }
    theirs, ours = _optimizer(**rules), _on_device(**rules)
    for number, overflow in enumerate(overflows):
        with patch.object(loss_scaler, "dist", SimpleNamespace(get_rank=lambda: 1)):  # it logs on rank 0
            theirs.loss_scaler.update_scale(overflow)
        ours.loss_scaler.update_scale(torch.tensor(overflow) if number % 2 else overflow)
        assert loss_scaler_state(ours) == {name: float(getattr(theirs.loss_scaler, name)) for name in FIELDS}
        assert float(current_loss_scale(ours)) == current_loss_scale(theirs)


@pytest.mark.parametrize("overflow", [False, True])
def test_a_step_that_is_held_back_does_not_move_it(overflow: bool) -> None:
    optimizer = _on_device(scale_window=1, delayed_shift=1)
    for is_held in (1.0, 0.0):
        before = loss_scaler_state(optimizer)
        kept = loss_scaler_tensor(optimizer)
        optimizer.loss_scaler.update_scale(torch.tensor(overflow), torch.tensor(is_held))
        assert (loss_scaler_state(optimizer) == before) is bool(is_held)
        assert kept is not None and kept.tolist() == list(before.values()), "who has read it keeps it"


def test_it_is_read_and_put_back() -> None:
    optimizer = _on_device()
    before = loss_scaler_state(optimizer)
    assert tuple(before) == FIELDS and before["cur_scale"] == 2**9
    other = {name: value + 1 for name, value in before.items()}
    set_loss_scaler_state(optimizer, other)
    assert loss_scaler_state(optimizer) == other
    set_loss_scaler_state(optimizer, {"cur_scale": 2.0})
    assert loss_scaler_state(optimizer) == other | {"cur_scale": 2.0}
    assert can_fall(optimizer, 2.0) and not can_fall(optimizer, 1.0)
    loss = torch.tensor(3.0)
    assert optimizer.loss_scaler.scale_loss(loss).dtype == torch.float32
    assert float(optimizer.loss_scaler.scale_loss(loss)) == 6.0


def test_without_a_dynamic_scale_there_is_none() -> None:
    fixed = SimpleNamespace(loss_scaler=CreateLossScaler(torch.half, 8.0, False, None), loss_scale=8.0)
    for optimizer, scale in ((SimpleNamespace(), 1.0), (fixed, 8.0)):
        keep_loss_scale_on_device(SimpleNamespace(optimizer=optimizer, device=torch.device("cpu")))
        assert current_loss_scale(optimizer) == scale
        assert loss_scaler_state(optimizer) == {} and not can_fall(optimizer, scale)
