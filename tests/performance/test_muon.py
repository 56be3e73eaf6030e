"""What Muon's update launches: matrices of one shape become orthogonal in one batch of products, however many."""

from __future__ import annotations

import torch

from megalite.engine.optimizers.muon import orthogonalized
from tests.helpers.counting import calls_of, kernels_of
from tests.performance.budgets import MUON_PRODUCTS


def test_products_do_not_grow_with_the_number_of_matrices() -> None:
    """In widening, as on this CPU without bf16 units, a product is one kernel all the same. Tall and wide matrices
    share a batch; no kernel is one of a single matrix."""
    shapes = {"gate": (8, 12), "up": (8, 12), "down": (12, 8), "o": (8, 8)}
    counts = []
    for copies in (1, 6):
        matrices = {
            f"{name} {copy}": torch.randn(shape).bfloat16() for name, shape in shapes.items() for copy in range(copies)
        }
        calls = kernels_of(calls_of(lambda matrices=matrices: orthogonalized(matrices)))
        assert sum(call.is_gemm for call in calls) == 2 * MUON_PRODUCTS
        counts.append(len(calls))
    assert counts[1] == counts[0]
