"""Weight gradients of linear layers computed after backward, for pipeline schedules that split it (Qi 2023).

Backward then computes the gradients of inputs, which other stages wait for, and those of small parameters (norms,
biases, routers, embeddings, and the head, whose gradient its loss computes in forward). Every linear layer puts the two
operands of its weight gradient into a queue, as Megatron-LM's and zero-bubble's `WeightGradStore` do. So nothing is run
twice and no graph is kept: from one part of backward to the other live only those operands.

The queue belongs to the layers, because on CUDA backward runs in a thread of autograd's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.parallel.linear import LinearLayer, linear, multipliable


class PutOffProduct(NamedTuple):
    """A weight gradient `grad^T x` that is still to be computed. Views of tensors of backward, not copies: nobody may
    change them in place, so a buffer that a stage has received gradients in lives as long as its products."""

    weight: nn.Parameter
    grad: Tensor  # [tokens, out], of the layer's output without its bias
    x: Tensor  # [tokens, in]


class WeightGradientQueue:
    """The products that layers have put off, in the order of backward. One serves all layers of an engine."""

    def __init__(self) -> None:
        self._products: list[PutOffProduct] = []

    def put(self, weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Adds a product; see `PutOffProduct`. Layers call it in backward."""
        self._products.append(PutOffProduct(weight, grad, x))

    def take(self) -> list[PutOffProduct]:
        """Returns the products since the last call, those of one backward, and forgets them."""
        products, self._products = self._products, []
        return products


def put_off_weight_gradients(model: nn.Module) -> WeightGradientQueue:
    """Makes every `LinearLayer` of `model` put its weight gradient off, and returns the queue that it goes to.

    Forward without gradients is not affected. A layer whose input needs no gradient puts nothing off.
    """
    queue = WeightGradientQueue()
    for module in model.modules():
        if isinstance(module, LinearLayer):
            module.product = partial(linear, queue=queue)
    return queue


class _LateProducts(torch.autograd.Function):
    """A scalar whose backward computes the gradient of one weight from its products, whatever its own gradient is."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, products: list[PutOffProduct]) -> Tensor:
        ctx.products = products
        return torch.zeros((), device=weight.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        gradient: Tensor | None = None
        ctx.products.reverse()
        while ctx.products:
            weight, grad, x = ctx.products.pop()
            # operands in the order of `F.linear`'s own gradient: the same bits
            product = (multipliable(grad).t() @ multipliable(x)).to(weight.dtype)
            gradient = product if gradient is None else gradient.add_(product)
        return gradient, None


def root_of_weight_gradients(products: list[PutOffProduct]) -> Tensor:
    """Returns a scalar whose backward computes the gradients of `products` and accumulates them, weight by weight in
    the order of backward, so that one at a time exists where hooks free what they have taken. Empties `products`.

    The gradients of a layer that was applied several times are summed in the dtype of its weight, as autograd does. So
    pass the products of one micro-batch at a time: their sum belongs to whoever accumulates in fp32.
    """
    by_weight: dict[nn.Parameter, list[PutOffProduct]] = {}
    for product in products:
        by_weight.setdefault(product.weight, []).append(product)
    products.clear()
    # autograd runs what was made last first
    scalars = [_LateProducts.apply(weight, own) for weight, own in reversed(by_weight.items())]
    return torch.stack(scalars).sum()
