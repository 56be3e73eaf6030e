"""Weight gradients of linear layers computed after backward, for pipeline schedules that split it (Qi 2023).

Backward then computes the gradients of inputs, which other stages wait for, and those of small parameters (norms,
biases, routers, embeddings, and the head, whose gradient its loss computes in forward). Every linear layer puts the two
operands of its weight gradient into a queue, as Megatron-LM's and zero-bubble's `WeightGradStore` do. So nothing is run
twice and no graph is kept: from one part of backward to the other live only those operands.

The queue belongs to the layers, because on CUDA backward runs in a thread of autograd's own.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.parallel.gradient_accumulation_fusion import SumsGradients
from megalite.parallel.grouped_linear import (
    GroupedLinear,
    RowGroups,
    grouped_linear,
    grouped_weight_gradient,
)
from megalite.parallel.linear import LinearLayer, linear, multipliable


class PutOffProduct(NamedTuple):
    """A weight gradient `grad^T x` that is still to be computed. Views of tensors of backward, not copies: nobody may
    change them in place, so a buffer that a stage has received gradients in lives as long as its products."""

    weight: nn.Parameter
    grad: Tensor  # [tokens, out], of the layer's output without its bias
    x: Tensor  # [tokens, in]
    groups: RowGroups | None = None  # of experts, whose products are one stack

    def compute(self) -> Tensor:
        """Returns the product, in the shape of the weight."""
        if self.groups is not None:
            return grouped_weight_gradient(self.grad, self.x, self.groups)
        # operands in the order of `F.linear`'s own gradient: the same bits
        return (multipliable(self.grad).t() @ multipliable(self.x)).to(self.weight.dtype)


class WeightGradientQueue:
    """The products that layers have put off, in the order of backward. One serves all layers of an engine."""

    def __init__(self) -> None:
        self._products: list[PutOffProduct] = []

    def put(self, weight: nn.Parameter, grad: Tensor, x: Tensor, groups: RowGroups | None = None) -> None:
        """Adds a product; see `PutOffProduct`. Layers call it in backward."""
        self._products.append(PutOffProduct(weight, grad, x, groups))

    def take(self) -> list[PutOffProduct]:
        """Returns the products since the last call, those of one backward, and forgets them."""
        products, self._products = self._products, []
        return products


def put_off_weight_gradients(model: nn.Module) -> WeightGradientQueue:
    """Makes every `LinearLayer` and `GroupedLinear` of `model` put its weight gradient off, and returns the queue.

    Forward without gradients is not affected. A layer whose input needs no gradient puts nothing off.
    """
    queue = WeightGradientQueue()
    for module in model.modules():
        if isinstance(module, LinearLayer):
            module.product = partial(linear, put=queue.put)
        elif isinstance(module, GroupedLinear):
            module.product = partial(grouped_linear, put=queue.put)
    return queue


@torch.no_grad()
def compute_put_off(products: list[PutOffProduct], sums: SumsGradients) -> None:
    """Adds `products` to the sums of their weights in the order of backward, one at a time. Empties the list."""
    products.reverse()
    while products:
        product = products.pop()
        if product.groups is None and sums.takes_products:
            sums.add_product(product.weight, product.grad, product.x)
        else:
            sums.add(product.weight, product.compute())
