"""What a decoder block costs: kernels, bytes kept, square tensors, collectives, graph breaks, against budgets.py.

Would catch: a kernel more in the forward or backward of every block, an activation that is kept besides, a mask that
each block makes for itself, a collective more, and a block that torch.compile no longer gets into one graph.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.helpers.counting import collectives_of, count_block, why_not_one_graph
from tests.performance.budgets import BLOCKS, ONE_GRAPH

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
