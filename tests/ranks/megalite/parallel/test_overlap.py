"""The order in which the backward of linear layers begins collectives, multiplies and waits, on real ranks.

Would catch a collective that begins behind the product it should travel beside, one that is waited for before that
product, and an order that differs between ranks, in which they would wait for each other.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import Begun, TensorParallel
from megalite.parallel.deferred_weight_gradients import put_off_weight_gradients
from megalite.parallel.linear import ColumnParallelLinear
from tests.helpers.counting import Call, CallLog
from tests.helpers.rank_pool import run_ranks

WIDE, NARROW, LENGTH = 6, 5, 8


def _named(call: Call) -> str:
    """Names a product by what it makes."""
    if not call.is_gemm:
        return call.name
    return "weight gradient" if tuple(call.shapes[-1]) == (NARROW, WIDE) else "input gradient"


def _order(rank: int, is_cut: bool, is_split: bool) -> list[str]:
    tp = TensorParallel(2, rank, dist.group.WORLD, is_cut)
    layer = ColumnParallelLinear(WIDE, {"": 2 * NARROW}, bias=False, tp=tp)
    torch.nn.init.ones_(layer.weight)
    if is_split:
        put_off_weight_gradients(layer)
    y = layer(torch.ones(1, LENGTH // (2 if is_cut else 1), WIDE, requires_grad=True))
    wait = Begun.wait

    def logged(begun: Begun) -> Tensor:
        log.calls.append(Call("wait", ()))
        return wait(begun)

    with patch.object(Begun, "wait", logged), CallLog() as log:
        y.backward(torch.ones_like(y))
    names = [_named(call) for call in log.calls if call.is_gemm or call.is_collective or call.name == "wait"]
    assert names, [call.name for call in log.calls]
    return names


@pytest.mark.parametrize(
    ("is_cut", "is_split", "order"),
    [
        (False, False, "input gradient, all_reduce, weight gradient, wait"),
        (True, False, "all_gather, input gradient, reduce_scatter, wait, weight gradient, wait"),
        (False, True, "input gradient, all_reduce, wait"),
        (True, True, "all_gather, input gradient, reduce_scatter, wait, wait"),
    ],
)
def test_collectives_begin_before_the_products_that_hide_them(is_cut: bool, is_split: bool, order: str) -> None:
    for seen in run_ranks(_order, 2, is_cut, is_split):
        assert ", ".join(seen) == order
