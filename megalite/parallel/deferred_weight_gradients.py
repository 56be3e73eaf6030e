"""Weight gradients of linear layers computed after backward, for pipeline schedules that split it (Qi 2023).

Backward then computes the gradients of inputs, which other stages wait for, and those of small parameters (norms,
biases, routers, embeddings, and the head, whose gradient its loss computes in forward). Every linear layer puts the two
operands of its weight gradient into a queue, as Megatron-LM's and zero-bubble's `WeightGradStore` do. So nothing is run
twice and no graph is kept: from one part of backward to the other live only those operands.

The queue belongs to the layers, because on CUDA backward runs in a thread of autograd's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.parallel.grouped_linear import (
    GroupedLinear,
    RowGroups,
    grouped_linear,
    grouped_product,
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
        self.watch: Callable[[nn.Parameter, Tensor], None] | None = None  # is given what `put` is

    def put(self, weight: nn.Parameter, grad: Tensor, x: Tensor, groups: RowGroups | None = None) -> None:
        """Adds a product; see `PutOffProduct`. Layers call it in backward."""
        if self.watch is not None:
            self.watch(weight, grad)
        self._products.append(PutOffProduct(weight, grad, x, groups))

    def take(self) -> list[PutOffProduct]:
        """Returns the products since the last call, those of one backward, and forgets them."""
        products, self._products = self._products, []
        return products


class _PutOffGroupedLinear(torch.autograd.Function):
    """`grouped_linear` whose backward leaves the weight's gradient to `queue`. The weight comes in a list, into which
    autograd does not look, for the reason of `linear._PutOff`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: list[nn.Parameter], groups: RowGroups, queue: WeightGradientQueue
    ) -> Tensor:
        (ctx.weight,) = weight
        ctx.save_for_backward(x)
        ctx.groups, ctx.queue = groups, queue
        return grouped_product(x, ctx.weight.detach().transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        ctx.queue.put(ctx.weight, grad.detach(), x.detach(), ctx.groups)
        return grouped_product(grad, ctx.weight.detach(), ctx.groups), None, None, None


def _put_off_grouped_linear(queue: WeightGradientQueue, x: Tensor, weight: nn.Parameter, groups: RowGroups) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad and weight.requires_grad:
        return _PutOffGroupedLinear.apply(x, [weight], groups, queue)
    return grouped_linear(x, weight, groups)


def put_off_weight_gradients(model: nn.Module) -> WeightGradientQueue:
    """Makes every `LinearLayer` and `GroupedLinear` of `model` put its weight gradient off, and returns the queue.

    Forward without gradients is not affected. A layer whose input needs no gradient puts nothing off.
    """
    queue = WeightGradientQueue()
    for module in model.modules():
        if isinstance(module, LinearLayer):
            module.product = partial(linear, put=queue.put)
        elif isinstance(module, GroupedLinear):
            module.product = partial(_put_off_grouped_linear, queue)
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
            product = ctx.products.pop().compute()
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
