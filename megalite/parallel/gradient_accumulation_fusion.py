"""Weight gradients `grad^T x` that the GEMM which computes them adds to their sum: none is written, read and added.

A gradient of its own would cost three passes through memory of the size of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class SumsGradients(Protocol):
    """The receiver of a weight's gradients that lets products be added where it sums: `GradientReducer`.

    A weight names its own as `gradient_sums`. Hooks of `register_hook` would not see these gradients: a weight that has
    some gets its gradients from autograd. Post-accumulate hooks run all the same, with `grad` None.

    Each product is one gradient. A layer that a forward pass applies twice brings two per micro-batch, of which
    `GradientReducer.expect_more` wants to know. So does every backward pass through the layer, also a
    `torch.autograd.grad` of its input alone: torch tells a Function only which inputs could have gradients.
    """

    takes_products: bool  # of linear layers, whose number is known
    is_fp32: bool  # what `sum_of` returns

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None: ...

    def add_product(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None: ...

    def sum_of(self, parameter: Tensor) -> Tensor:
        """Returns the sum of a weight's gradients, to which embedding and head add one in place; the weight's hook runs
        behind it, with `grad` None, and counts it."""


def leaves_autograd(weight: Tensor) -> bool:
    """Returns whether a layer may hand its weight's gradient over beside autograd: hooks of `register_hook` would miss
    it, and a compiled graph calls nobody."""
    is_trained = weight.requires_grad and torch.is_grad_enabled()
    return is_trained and not (weight._backward_hooks or torch.compiler.is_compiling())


def sum_in_place(weight: Tensor) -> Callable[[], Tensor] | None:
    """Returns `SumsGradients.sum_of` for a weight whose gradients are summed in fp32."""
    sums: SumsGradients | None = getattr(weight, "gradient_sums", None)
    return partial(sums.sum_of, weight) if sums is not None and sums.is_fp32 and leaves_autograd(weight) else None


def add_product(total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool = False) -> None:
    """Adds `grad^T x` to `total` `[out, in]`, or writes the first one over it; `[tokens, out]`, `[tokens, in]`.

    An fp32 sum of 16-bit operands takes one kernel on CUDA with a recent torch; elsewhere the product is a matrix of
    its own.
    """
    if total.dtype == grad.dtype or _adds_to_fp32(grad.device, grad.dtype):
        wide: Any = {} if total.dtype == grad.dtype else {"out_dtype": torch.float32}
        if is_first:
            torch.mm(grad.t(), x, out=total, **wide)
        else:
            torch.addmm(total, grad.t(), x, out=total, **wide)
    elif is_first:
        total.copy_(weight_product(grad, x))
    else:
        total.add_(weight_product(grad, x))


def weight_product(grad: Tensor, x: Tensor) -> Tensor:
    """Returns `grad^T x`, in fp32 unless that takes a slower GEMM."""
    is_rounded = grad.dtype == torch.bfloat16 and grad.device.type == "cpu"
    return torch.mm(grad.t(), x) if is_rounded else wide_product(grad.t(), x)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product of two matrices in fp32, in which the GEMM sums it."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.device.type == "cpu":  # torch 2.13 has such a GEMM on CUDA only
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


@lru_cache(maxsize=4)
def _adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a GEMM of 16-bit operands can add its result to an fp32 matrix, which takes CUDA and a recent torch:
    older ones want all three in one format."""
    total = torch.zeros(16, 16, device=device)
    operand = total.to(dtype)
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
        torch.mm(operand, operand, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
