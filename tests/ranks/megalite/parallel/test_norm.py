"""Gemma's norm against transformers' and against autograd; its weight's gradient where the sequence is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.collectives import TensorParallel, parameter_in_parallel_region
from megalite.parallel.norm import RMSNorm, ZeroCenteredRMSNorm
from tests.helpers.rank_pool import run_ranks

SIZE, EPS = 47, 1e-5
SERIAL = TensorParallel()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_of(dtype: torch.dtype, tp: TensorParallel = SERIAL) -> ZeroCenteredRMSNorm:
    norm = ZeroCenteredRMSNorm(SIZE, EPS, tp).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(draw(SIZE, seed=1) / 4)
    return norm


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + weight)


def test_a_new_one_only_normalizes() -> None:
    x = draw(2, 5, SIZE, dtype=torch.float32)
    new = ZeroCenteredRMSNorm(SIZE, EPS, SERIAL)
    assert new.weight.shard.initializer == "zeros"  # type: ignore[attr-defined]
    torch.nn.init.zeros_(new.weight)
    ones = RMSNorm(SIZE, EPS, SERIAL)
    torch.nn.init.ones_(ones.weight)
    assert torch.equal(new(x), ones(x))


def test_gradients_are_those_of_the_formula() -> None:
    x, norm = draw(2, 3, SIZE).requires_grad_(), norm_of(torch.float64)
    torch.testing.assert_close(norm(x), plain(x, norm.weight), atol=1e-14, rtol=0)
    apply = lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,))  # noqa: E731
    weight = norm.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(apply, (x, weight))
    # one head of several: neither the input nor the gradient is contiguous
    heads = draw(2, 3, 2, SIZE, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: apply(x[:, :, 1], w).transpose(0, 1), (heads, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_rounds_as_gemmas_forward_and_no_worse_backward(dtype: torch.dtype) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    theirs = Gemma2RMSNorm(SIZE, EPS).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(norm_of(dtype).weight)

    def gradients(function: Any, weight: Tensor, dtype: torch.dtype) -> list[Tensor]:
        x = draw(4, 16, SIZE, seed=2, dtype=torch.bfloat16).to(dtype).requires_grad_()
        out = function(x)
        out.backward(draw(4, 16, SIZE, seed=9, dtype=torch.bfloat16).to(dtype))
        assert x.grad is not None and weight.grad is not None
        return [out.detach(), x.grad, weight.grad]

    ours, exact_weight = norm_of(dtype), norm_of(dtype).weight.detach().double().requires_grad_()
    exact = gradients(lambda x: plain(x, exact_weight), exact_weight, torch.float64)
    their, our = gradients(theirs, theirs.weight, dtype), gradients(ours, ours.weight, dtype)
    if dtype == torch.bfloat16:
        assert torch.equal(our[0], their[0])  # a factor rounded to bf16 before the product would be another number
    for name, want, their_one, our_one in zip(("y", "dx", "dw"), exact, their, our, strict=True):
        # half a rounding of luck more than theirs, and fp32 sums in another order
        assert (our_one - want).norm() <= 1.5 * (their_one - want).norm() + 1e-6 * want.norm(), name


def test_it_keeps_its_input_and_a_number_per_token() -> None:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    x = draw(8, 16, SIZE, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm_of(torch.bfloat16)(x)
    assert sum(kept.values()) == 8 * 16 * (2 * SIZE + 4) + 2 * SIZE


def _on_rank(rank: int, tp_size: int) -> tuple[Tensor, Tensor]:
    tp = TensorParallel(tp_size, rank, dist.group.WORLD if tp_size > 1 else None, sequence_parallel=True)
    x = draw(2, 6, SIZE).chunk(tp_size, dim=1)[rank].clone()
    norm = norm_of(torch.float64, tp)
    out = norm(x)
    out.backward(draw(2, 6, SIZE, seed=9).chunk(tp_size, dim=1)[rank])
    assert norm.weight.grad is not None and norm.weight.is_summed_at_step == (tp_size > 1)  # type: ignore[attr-defined]
    return out.detach(), norm.weight.grad


def test_a_cut_sequence_has_the_gradient_of_the_whole() -> None:
    (out, gradient), ranks = _on_rank(0, 1), run_ranks(_on_rank, 2, 2)
    torch.testing.assert_close(torch.cat([seen for seen, _ in ranks], dim=1), out, atol=0, rtol=0)
    torch.testing.assert_close(sum(found for _, found in ranks), gradient, atol=1e-13, rtol=0)


def _parts_of_a_gradient(rank: int) -> tuple[Tensor, Tensor]:
    """A part's bf16 gradient, and what a parameter gets of all."""
    tp = TensorParallel(4, rank, dist.group.WORLD, sequence_parallel=True)
    part, parameter = draw(1001, seed=20 + rank, dtype=torch.bfloat16), torch.zeros(1001, dtype=torch.bfloat16)
    parameter_in_parallel_region(parameter.requires_grad_(), tp).backward(part)
    assert parameter.grad is not None
    return part, parameter.grad


def test_parts_of_a_gradient_are_summed_before_they_are_rounded() -> None:
    """Sums in bf16 differ in every second entry of four ranks' sum."""
    ranks = run_ranks(_parts_of_a_gradient, 4)
    total = sum(part.double() for part, _ in ranks)
    for _, gradient in ranks:
        assert torch.equal(gradient, total.to(torch.bfloat16))
