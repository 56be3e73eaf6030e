"""Column- and row-parallel layers in float8 on ranks against the same layers on one process in float64."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.float8 import Recipe, use_float8
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.helpers.rank_pool import run_ranks

HIDDEN, FEATURES = 48, 64
LEAST_COSINE = 0.99


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and gradients of the output `[2, 16, hidden]`, and both weights."""
    draw = torch.Generator().manual_seed(11)
    x, grad = torch.randn(2, 16, HIDDEN, generator=draw), torch.randn(2, 16, HIDDEN, generator=draw)
    up, down = torch.randn(FEATURES, HIDDEN, generator=draw), torch.randn(HIDDEN, FEATURES, generator=draw)
    return x, grad, up * 0.1, down * 0.1


def _on_ranks(rank: int, recipe: Recipe | None, sequence_parallel: bool) -> dict[str, Tensor]:
    size = dist.get_world_size()
    tp = TensorParallel(size, rank, dist.group.WORLD, sequence_parallel)
    x, grad, up_weight, down_weight = problem()
    if sequence_parallel:
        x, grad = (each.chunk(size, dim=1)[rank].contiguous() for each in (x, grad))
    layers = nn.ModuleList(
        [ColumnParallelLinear(HIDDEN, {"up": FEATURES}, False, tp), RowParallelLinear(FEATURES, HIDDEN, False, tp)]
    )
    up, down = layers
    with torch.no_grad():
        up.weight.copy_(up_weight.chunk(size)[rank])  # type: ignore[operator, union-attr]
        down.weight.copy_(down_weight.chunk(size, dim=1)[rank])  # type: ignore[operator, union-attr]
    if recipe is not None:
        use_float8(layers, recipe)
    x.requires_grad_()
    y = down(F.gelu(up(x)))
    y.backward(grad)
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, "up": up.weight.grad, "down": down.weight.grad}  # type: ignore[dict-item, union-attr]


@pytest.mark.parametrize("recipe", get_args(Recipe))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_compute_what_one_process_does_but_for_rounding(recipe: Recipe, sequence_parallel: bool) -> None:
    """Would catch a product that does not enter the parallel region, or enters it twice. Layers are two deep, and
    scales those of parts, so that bounds are those of `megalite verify`."""
    x, grad, up, down = (each.double() for each in problem())
    x.requires_grad_(), up.requires_grad_(), down.requires_grad_()
    y = F.gelu(x @ up.t()) @ down.t()
    y.backward(grad)
    exact: dict[str, Any] = {"y": y, "x": x.grad, "up": up.grad, "down": down.grad}
    ranks = run_ranks(_on_ranks, 2, recipe, sequence_parallel)
    whole = {
        "up": torch.cat([seen["up"] for seen in ranks]),
        "down": torch.cat([seen["down"] for seen in ranks], dim=1),
        **{name: torch.cat([s[name] for s in ranks], dim=1) if sequence_parallel else ranks[0][name] for name in "yx"},
    }
    for name, truth in exact.items():
        ours = whole[name].double()
        assert F.cosine_similarity(ours.flatten(), truth.flatten(), dim=0) > LEAST_COSINE, name
        assert abs(ours.norm() / truth.norm() - 1) < 0.05, name
