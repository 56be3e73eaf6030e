"""Products of many experts, as one kernel and as a loop: torch's kernel also runs on a CPU where sizes are aligned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.parallel import linear
from megalite.parallel.grouped_linear import RowGroups, grouped_linear, why_no_grouped_kernel

COUNTS = [3, 0, 7, 1, 0]  # rows of each expert
ENDS = torch.tensor(COUNTS, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(sum(COUNTS), 24), torch.randn(len(COUNTS), 40, 24)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_is_the_loop_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ends that are beginnings, a transposed weight, and a gradient that one of the two does not compute."""
    monkeypatch.setattr(linear, "_cpu_multiplies_bf16", lambda: True)
    x, weight = operands(dtype)
    found = []
    for is_one_kernel in (False, True):
        y = grouped_linear(x, weight, RowGroups.of(ENDS, is_one_kernel=is_one_kernel))
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    for looped, at_once in zip(*found, strict=True):
        assert torch.equal(looped, at_once)
    assert not found[0][2][1].any() and not found[0][2][4].any(), "experts without rows have a gradient of zero"


@pytest.mark.parametrize("is_one_kernel", [False, True])
def test_a_gradient_without_strides_is_taken(is_one_kernel: bool) -> None:
    """torch's own gradient raises then; a sum has such a gradient."""
    x, weight = operands(torch.float32)
    grouped_linear(x, weight, RowGroups.of(ENDS, is_one_kernel=is_one_kernel)).sum().backward()
    parts = zip(x.detach().split(COUNTS), weight, strict=True)
    wanted = torch.stack([part.sum(0).expand(40, 24) for part, _ in parts])
    torch.testing.assert_close(weight.grad, wanted)


def test_a_cpu_without_bf16_units_rounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_cpu_multiplies_bf16", lambda: False)
    x, weight = operands(torch.bfloat16)
    y = grouped_linear(x, weight, RowGroups.of(ENDS, is_one_kernel=False))
    parts = zip(x.split(COUNTS), weight, strict=True)
    assert torch.equal(y, torch.cat([(part.float() @ matrix.float().t()).bfloat16() for part, matrix in parts]))


def test_what_the_kernel_does_not_take_is_named() -> None:
    on_device = torch.empty(3, 24, device="meta")
    aligned, odd = [(5, 80, 24), (5, 24, 40)], [(5, 58, 24), (5, 24, 29)]
    assert why_no_grouped_kernel(on_device.bfloat16(), aligned) is None
    assert "bf16, not for float16" in str(why_no_grouped_kernel(on_device.half(), aligned))
    assert "[58, 24] and [24, 29]" in str(why_no_grouped_kernel(on_device.bfloat16(), odd))
    assert "CPU" in str(why_no_grouped_kernel(torch.empty(3, 24, dtype=torch.bfloat16), aligned))
