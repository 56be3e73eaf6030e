"""What a decoder block costs: kernels, bytes kept, square tensors, collectives, graph breaks, against budgets.py.

Would catch: a kernel more in the forward or backward of every block, an activation that is kept besides, a mask that
each block makes for itself, a collective more, and a block that torch.compile no longer gets into one graph.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.helpers.counting import BlockCase, collectives_of, count_block, why_not_one_graph
from tests.performance.budgets import BLOCKS, KERNELS_OF_AN_EXPERT, ONE_GRAPH, SYNCS_OF_EXPERTS

# kept bytes are exact; a tenth of the smallest tensor that a block keeps per token, its attention's log-sums
ROUNDING = 0.005


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_keeps_to_its_budget(name: str) -> None:
    budget = BLOCKS[name]
    counts = count_block(budget.case)
    assert (counts.forward_kernels, counts.backward_kernels) == (budget.forward, budget.backward), counts.names
    assert counts.kept == pytest.approx(budget.kept, abs=ROUNDING)
    assert counts.squares == budget.squares
    assert Counter(call.name for call in collectives_of(counts.forward + counts.backward)) == budget.collectives
    assert not counts.syncs


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_torch_compile_gets_a_block_into_one_graph(name: str) -> None:
    assert why_not_one_graph(BLOCKS[name].case) is None


def _sparse(experts: int) -> BlockCase:
    model: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    return BlockCase(model, seq=96, device="cpu")


def test_kernels_of_a_block_with_experts_grow_by_its_budget() -> None:
    few, many = count_block(_sparse(4)), count_block(_sparse(8))
    grown = many.forward_kernels - few.forward_kernels, many.backward_kernels - few.backward_kernels
    assert grown == tuple(4 * kernels for kernels in KERNELS_OF_AN_EXPERT)
    assert len(many.syncs) == SYNCS_OF_EXPERTS, many.syncs
