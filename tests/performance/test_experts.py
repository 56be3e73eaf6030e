"""Operations of a layer with experts, counted on the meta device: it takes the way of a GPU and has no numbers, so that
whatever waits for the device raises."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config import ModelConfig
from megalite.config.sections import RouterConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.weight_gradients import put_off_weight_gradients, root_of_weight_gradients
from models.experts import SparseMLP

VIEWS = ("view", "_unsafe_view", "t", "transpose", "detach", "expand", "unsqueeze", "split", "slice", "alias", "select")


class Operations(TorchDispatchMode):
    """Counts the operations that compute or move numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0]
        if name not in VIEWS:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def layer_of(experts: int) -> SparseMLP:
    sizes = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "intermediate_size": 64}
    with torch.device("meta"):
        return SparseMLP(ModelConfig.model_validate(sizes), TensorParallel()).bfloat16()


def operations(experts: int, *, is_split: bool = False, losses: RouterConfig | None = None) -> Counter[str]:
    layer = layer_of(experts)
    layer.balance.losses = losses or RouterConfig()
    queue = put_off_weight_gradients(layer) if is_split else None
    x = torch.empty(2, 33, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Operations() as seen:
        layer(x).backward(torch.empty_like(x))
        if queue is not None:
            root_of_weight_gradients(queue.take()).backward()
    return seen.counts


@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "split backward"])
def test_operations_do_not_grow_with_the_experts_and_nothing_waits_for_the_device(is_split: bool) -> None:
    few, many = operations(8, is_split=is_split), operations(128, is_split=is_split)
    assert few == many
    assert many["_grouped_mm"] == 6, "a product and two gradients of each projection"
    assert sum(many.values()) <= (75 if is_split else 70)


def test_balance_losses_cost_a_few_operations() -> None:
    losses = RouterConfig(sequence_loss=1e-3, z_loss=1e-3)
    few, many = operations(8, losses=losses), operations(128, losses=losses)
    assert few == many
    assert sum(many.values()) - sum(operations(8).values()) <= 36
