"""Fused passes by inductor: one graph and one kernel each, and their numbers against float64.

Would catch: an activation that takes a pass of its own or is kept, a shape that compiles anew, a gradient left out of a
sum, and a pass that recomputation computes otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import metrics

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.fused_passes import fused, sum_and_norm
from megalite.parallel.norm import NORMS
from models.attention import rotated
from models.feed_forward import gated

# of the largest number; of 16 bits a rounding of the result and one of what was rounded before
BOUNDS = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def results(function: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    inputs = tuple(each.detach().requires_grad_() for each in inputs)
    made = function(*inputs)
    made = made if isinstance(made, tuple) else (made,)
    return *made, *torch.autograd.grad(made, inputs, [draw(*each.shape).to(each.dtype) for each in made])


@pytest.mark.slow  # starts a C++ compiler
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", *NORMS])
def test_a_fused_pass_is_one_graph_and_near_float64(name: str, dtype: torch.dtype) -> None:
    torch._inductor.config.compile_threads = 1  # of few graphs: other processes would each import torch first
    torch._dynamo.reset(), metrics.reset(), counters.clear()
    norm = NORMS[name](48, 1e-5, TensorParallel()) if name in NORMS else None
    pass_ = (gated(name),) if norm is None else (sum_and_norm, norm.normalize, norm.eps)
    kept, vectors = list[int](), [] if norm is None else [draw(48).to(dtype) for _ in norm.parameters()]
    for rows in (5, 7, 33):
        x = [draw(2, rows, 48).to(dtype) for _ in range(2 if vectors else 1)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
            found = results(fused(*pass_), *x, *vectors)
        for one, exact in zip(found, results(partial(*pass_), *(e.double() for e in [*x, *vectors])), strict=True):
            assert one.dtype == dtype and (one.double() - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max()
        assert vectors or (kept.pop() == x[0].data_ptr() and not kept)
    assert counters["stats"]["unique_graphs"] == 1
    if not vectors:
        assert metrics.generated_kernel_count == 2
        with torch.no_grad():  # as selective recomputation does
            assert torch.equal(fused(*pass_)(*x), found[0])


@pytest.mark.slow  # starts a C++ compiler
@pytest.mark.parametrize("sizes", [(6, 2, 2), (6, 2)], ids=["one buffer", "queries and keys"])
def test_rotation_is_one_kernel_each_way(sizes: tuple[int, ...]) -> None:
    torch._inductor.config.compile_threads = 1
    torch._dynamo.reset(), metrics.reset(), counters.clear()
    for rows in (5, 7, 33):
        heads, angle = draw(2, rows, sum(sizes), 20).bfloat16(), draw(1, rows, 1, 8)
        parts = (heads,) if len(sizes) == 3 else heads.split(sizes, dim=2)
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        found, exactly = (
            results(partial(rotated, run, sizes, cos.to(dtype), sin.to(dtype)), *(each.to(dtype) for each in parts))
            for run, dtype in ((fused, torch.bfloat16), (partial, torch.float64))
        )
        for one, exact in zip(found, exactly, strict=True):
            assert (one.double() - exact).abs().max() <= BOUNDS[one.dtype] * exact.abs().max()
    assert counters["stats"]["unique_graphs"] == metrics.generated_kernel_count == 2
