"""Counts of a layer with experts on the meta device, which goes the way of a GPU and has no numbers: a wait raises.

Would catch: an operation for each expert, a count that the host reads, and a balance loss that costs more than it must.
"""

from __future__ import annotations

import pytest
import torch

from megalite.config import ModelConfig
from megalite.config.sections import RouterConfig
from megalite.engine.statistics.expert_bias import ExpertCounts
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.deferred_weight_gradients import compute_put_off, put_off_weight_gradients
from megalite.parallel.expert_balance import PlacedBalance
from models.experts import SparseMLP
from tests.helpers.counting import CallLog
from tests.helpers.late_gradients import Sums
from tests.performance.budgets import KERNELS_OF_BALANCE_LOSSES, KERNELS_OF_EXPERTS


def kernels_of_layer(experts: int, losses: RouterConfig, *, is_split: bool = False) -> tuple[list[str], list[str]]:
    """Returns the kernels of forward and backward, which may put the weight gradients off."""
    sizes = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "intermediate_size": 64}
    with torch.device("meta"):
        layer = SparseMLP(ModelConfig.model_validate(sizes), TensorParallel()).bfloat16()
        x = torch.empty(2, 33, 64, dtype=torch.bfloat16, requires_grad=True)
    layer.balance.losses = losses
    queue = put_off_weight_gradients(layer) if is_split else None
    ExpertCounts([PlacedBalance(0, "", layer.balance)], x.device)
    with CallLog() as forward:
        y = layer(x)
    with CallLog() as backward:
        y.backward(torch.empty_like(y))
        if queue is not None:
            compute_put_off(queue.take()[-2:], Sums())
    return [call.name for call in forward.calls], [call.name for call in backward.calls]


@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "split backward"])
def test_kernels_do_not_grow_with_the_experts_and_nothing_waits_for_the_device(is_split: bool) -> None:
    few, many = (kernels_of_layer(experts, RouterConfig(), is_split=is_split) for experts in (8, 128))
    assert few == many
    forward, backward = many
    assert (forward + backward).count("_grouped_mm") == 6, "a product and two gradients of each projection"
    assert (len(forward), len(backward)) == KERNELS_OF_EXPERTS


def test_balance_losses_cost_a_few_kernels() -> None:
    losses = RouterConfig(sequence_loss=1e-3, z_loss=1e-3)
    with_losses, without = (kernels_of_layer(128, which) for which in (losses, RouterConfig()))
    assert kernels_of_layer(8, losses) == with_losses
    assert sum(map(len, with_losses)) - sum(map(len, without)) == KERNELS_OF_BALANCE_LOSSES
