"""Weight gradients that the GEMM adds to their sum: against float64, and without a matrix of the weight's size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.gradient_accumulation_fusion import add_product
from megalite.parallel.linear import VocabParallelEmbedding, linear
from megalite.parallel.loss import IGNORED, head_loss

OUT, IN = 7, 5


class _Kernels(TorchDispatchMode):
    """The names of the kernels that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_summed_in_the_format_of_the_sum(dtype: torch.dtype) -> None:
    """The first one replaces what lies there. fp32: rounding of 33 terms; bf16 products are rounded once on a CPU."""
    total = torch.full((OUT, IN), torch.nan)
    expected = torch.zeros(OUT, IN, dtype=torch.float64)
    size = torch.zeros(OUT, IN, dtype=torch.float64)
    for number in range(3):
        grad, x = torch.randn(11, OUT).to(dtype), torch.randn(11, IN).to(dtype)
        add_product(total, grad, x, is_first=number == 0)
        expected += grad.double().t() @ x.double()
        size += grad.double().abs().t() @ x.double().abs()
    bound = 2**-8 if dtype == torch.bfloat16 else 1e-6
    assert ((total.double() - expected).abs() <= bound * size).all()


class _Sums:
    """The sum of one weight's gradients, as a reducer has it."""

    takes_products = is_fp32 = True

    def __init__(self, weight: Tensor) -> None:
        self.total, self.count = torch.empty_like(weight, dtype=torch.float32), 0

    def add_product(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        add_product(self.total, grad, x, is_first=self.count == 0)
        self.count += 1

    def sum_of(self, parameter: Tensor) -> Tensor:
        if self.count == 0:
            self.total.zero_()  # which a reducer does too
        self.count += 1
        return self.total


def test_a_layer_adds_its_gradient_and_writes_none() -> None:
    weight, x = nn.Parameter(torch.randn(OUT, IN)), torch.randn(2, 11, IN, requires_grad=True)
    weight.gradient_sums = sums = _Sums(weight)  # type: ignore[attr-defined]
    with _Kernels() as kernels:
        for _ in range(2):
            linear(x, weight, None).square().sum().backward()
    gemms = [name for name in kernels.names if name in ("mm", "addmm")]
    assert gemms.count("addmm") == 1 and weight.grad is None and sums.count == 2
    wide = nn.Parameter(weight.detach().double())
    torch.nn.functional.linear(x.detach().double(), wide).square().sum().backward()
    torch.testing.assert_close(sums.total.double(), 2 * wide.grad, rtol=1e-5, atol=1e-4)


def test_hooks_of_a_weight_see_its_gradient() -> None:
    weight, x = nn.Parameter(torch.randn(OUT, IN)), torch.randn(11, IN, requires_grad=True)
    weight.gradient_sums = sums = _Sums(weight)  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    handle = weight.register_hook(seen.append)
    linear(x, weight, None).sum().backward()
    assert len(seen) == 1 and sums.count == 0 and weight.grad is not None
    handle.remove()
    linear(x, weight, None).sum().backward()
    assert len(seen) == 1 and sums.count == 1


@pytest.mark.parametrize("seed", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_and_head_add_to_the_sum_of_their_weight(dtype: torch.dtype, seed: float) -> None:
    """Two micro-batches of a tied weight; fp32: sums of 22 terms, bf16: its rounding of each row and of the operands.
    The head's gradient is in the sum before backward begins, so a factor on the loss from then on may not pass."""
    vocabulary, hidden = 13, 8
    layer = VocabParallelEmbedding(vocabulary, hidden, TensorParallel())
    with torch.no_grad():
        layer.weight.copy_(torch.randn(vocabulary, hidden))
    layer.to(dtype)
    exact = layer.weight.detach().double().requires_grad_()
    layer.weight.gradient_sums = sums = _Sums(layer.weight)  # type: ignore[attr-defined]
    hooked: list[Tensor | None] = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: hooked.append(weight.grad))
    for _ in range(2):
        tokens, targets = torch.randint(0, vocabulary, (2, 11)), torch.randint(0, vocabulary, (2, 11))
        targets[0, 3] = IGNORED
        embedded = layer(tokens)
        embedded.retain_grad()
        factor = torch.tensor(1 / 21)
        loss = head_loss(embedded, layer.weight, targets, vocabulary, TensorParallel(), factor=factor)
        (loss * seed).backward()
        if seed != 1.0:
            assert embedded.grad.isnan().all()
            return
        hidden_states = torch.nn.functional.embedding(tokens, exact)
        logits = (hidden_states @ exact.t()).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED).backward()
    assert layer.weight.grad is None and hooked == [None, None] and sums.count == 4
    assert exact.grad is not None
    error = (sums.total.double() - exact.grad).norm() / exact.grad.norm()
    assert error < (1e-6 if dtype == torch.float32 else 2**-7)
