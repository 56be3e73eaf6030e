"""The counting itself, on what it must not overlook."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.attention import Attention
from models.feed_forward import MLP
from tests.helpers.counting import BlockCase, CallLog, count_block, kernels_of, syncs_of

FEW = BlockCase(seq=160)


def test_views_and_empty_tensors_are_no_kernels() -> None:
    x = torch.ones(4, 6)
    with CallLog() as log:
        x.view(2, 12).t().unsqueeze(0)[:, 1].expand(3, 2)
        torch.empty_like(x)
        x.add_(1).mul(2)
    assert [call.name for call in kernels_of(log.calls)] == ["add_", "mul"]


@pytest.mark.parametrize("read", [float, Tensor.tolist, bool, torch.Tensor.numpy, torch.nonzero])
def test_a_number_read_on_the_host_is_a_sync(read: Any) -> None:
    x = torch.ones(1)
    with CallLog() as log:
        read(x)
    assert len(syncs_of(log.calls)) == 1
    assert "test_counting.py" in syncs_of(log.calls)[0].where


def test_what_a_function_keeps_in_an_attribute_is_kept() -> None:
    """Would catch a count by saved_tensors_hooks, which see `save_for_backward` alone."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.twice = x * 2
            return ctx.twice * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    x = torch.ones(100, requires_grad=True)
    with CallLog() as log:
        y = Doubled.apply(x)
    assert log.kept_bytes(but=y) == 400


def test_planted_defects_change_the_counts() -> None:
    plain = count_block(FEW)
    feed_forward, attend = MLP.forward, Attention._attend

    def with_a_copy(self: MLP, hidden: Tensor) -> Tensor:
        return feed_forward(self, hidden.clone())

    def with_a_mask(self: Attention, inputs: Any, samples: Tensor | None, *projected: Tensor) -> Tensor:
        torch.ones(FEW.seq, FEW.seq, dtype=torch.bool, device=projected[0].device).tril_()
        return attend(self, inputs, samples, *projected)

    with patch.object(MLP, "forward", with_a_copy):
        copied = count_block(FEW)
    # the copy is kept by the GEMM and the norm's output no longer
    assert (copied.forward_kernels, copied.kept) == (plain.forward_kernels + 1, plain.kept)
    with patch.object(Attention, "_attend", with_a_mask):
        assert count_block(FEW).squares == 2
