"""A small model whose layers put weight gradients off, and those gradients as one dictionary."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.parallel.deferred_weight_gradients import PutOffProduct, root_of_weight_gradients
from tests.helpers.sizes import ODD_SIZES

SIZES = ODD_SIZES | {"num_hidden_layers": 2, "initializer_range": 0.2}


def late_gradients(products: list[PutOffProduct]) -> dict[nn.Parameter, Tensor]:
    """The gradient that backward leaves on each weight, which is reset."""
    weights = dict.fromkeys(product.weight for product in products)
    root_of_weight_gradients(products).backward()
    found = {weight: weight.grad for weight in weights if weight.grad is not None}
    for weight in weights:
        weight.grad = None
    return found
