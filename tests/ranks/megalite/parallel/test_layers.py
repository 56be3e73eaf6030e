"""Parallel layers, norms and collectives on real ranks against the same layers on one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import TensorParallel, gather_heads
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megalite.parallel.norm import LayerNorm, RMSNorm
from tests.helpers.rank_pool import run_ranks
from tests.helpers.replicated_gradients import sum_parts

VOCAB, HIDDEN, FEATURES, SEQUENCE = 13, 6, 7, 8  # vocabulary and features divide by neither 2 nor 4
NEAR = 1e-12  # float64, sums in another order


class Network(nn.Module):
    """Every layer that has a collective, forward or backward, in the order a block has them."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(VOCAB, HIDDEN, tp)
        self.layer_norm = LayerNorm(HIDDEN, 1e-5, tp)
        self.up = ColumnParallelLinear(HIDDEN, {"gate_proj": FEATURES, "up_proj": FEATURES}, True, tp)
        self.down = RowParallelLinear(FEATURES, HIDDEN, True, tp)
        self.rms_norm = RMSNorm(HIDDEN, 1e-6, tp)

    def forward(self, tokens: Tensor, extra: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + extra
        gate, up = self.up(self.layer_norm(hidden)).chunk(2, dim=-1)
        return self.rms_norm(hidden + self.down(F.gelu(gate) * up))


def built(tp: TensorParallel) -> Network:
    """The network in float64 with weights that depend on their global names and places only."""
    network = Network(tp).double()
    for path, parameter in network.named_parameters():
        shard = parameter.shard  # type: ignore[attr-defined]
        object.__setattr__(shard, "name", path)
        with torch.no_grad():
            parameter.zero_()
            for piece in shard.pieces():
                draw = torch.Generator().manual_seed(sum(piece.name.encode()))
                whole = torch.randn(piece.shape, generator=draw, dtype=torch.float64)
                parameter[piece.target] = whole[piece.source]
    return network


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (2, SEQUENCE), generator=draw)
    extra, direction = torch.randn(2, 2, SEQUENCE, HIDDEN, generator=draw, dtype=torch.float64)
    return tokens, extra, direction


def _run(rank: int, tp_size: int, sequence_parallel: bool) -> dict[str, Any]:
    tp = TensorParallel(tp_size, rank, dist.group.WORLD if tp_size > 1 else None, sequence_parallel)
    tokens, extra, direction = inputs()
    if tp.sequence_is_cut:
        extra, direction = (t.chunk(tp_size, dim=1)[rank].clone() for t in (extra, direction))
    extra.requires_grad_()
    network = built(tp)
    output = network(tokens, extra)
    (output * direction).sum().backward()
    sum_parts(network, tp)
    gradients = [
        (piece.name, piece.shape, piece.source, parameter.grad[piece.target])  # type: ignore[index]
        for parameter in network.parameters()
        for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
    ]
    return {"output": output.detach(), "extra": extra.grad, "gradients": gradients}


def _whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Global gradients; ranks that hold the same numbers must agree."""
    whole: dict[str, Tensor] = {}
    for seen in ranks:
        for name, shape, source, gradient in seen["gradients"]:
            target = whole.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))[source]
            known = ~target.isnan()
            torch.testing.assert_close(target[known], gradient[known], atol=NEAR, rtol=0, msg=f"{name}: replicas")
            target.copy_(gradient)
    return whole


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole sequence", "sequence parallel"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_outputs_and_every_gradient_equal_the_serial_layers(tp_size: int, sequence_parallel: bool) -> None:
    serial = _run(0, 1, sequence_parallel)
    ranks = run_ranks(_run, tp_size, tp_size, sequence_parallel)
    for key in ("output", "extra"):
        # under sequence parallelism each rank has a slice, without it the whole
        if sequence_parallel:
            parts = [torch.cat([seen[key] for seen in ranks], dim=1)]
        else:
            parts = [seen[key] for seen in ranks]
        for part in parts:
            torch.testing.assert_close(part, serial[key], atol=NEAR, rtol=0)
    expected, gradients = _whole([serial]), _whole(ranks)
    assert expected.keys() == gradients.keys()
    assert {"layer_norm.weight", "layer_norm.bias", "rms_norm.weight", "down.bias"} <= expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0.1, f"{name} has no gradient to compare"
        torch.testing.assert_close(gradients[name], gradient, atol=NEAR, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def _gathered(rank: int) -> tuple[Tensor, Tensor]:
    tp = TensorParallel(dist.get_world_size(), rank, dist.group.WORLD)
    mine = (torch.arange(3, dtype=torch.float64) + 10 * rank).reshape(1, 1, 3).requires_grad_()
    whole = gather_heads(mine, tp, dim=-1)
    # each rank's queries look at the whole with other weights: their gradients must be summed
    (whole * (rank + 1) * torch.arange(1, whole.shape[-1] + 1)).sum().backward()
    assert mine.grad is not None
    return whole.detach(), mine.grad


def test_gathered_heads_get_the_gradient_of_every_ranks_queries() -> None:
    ranks = run_ranks(_gathered, 2)
    whole = torch.tensor([[[0, 1, 2, 10, 11, 12]]], dtype=torch.float64)
    for rank, (seen, gradient) in enumerate(ranks):
        torch.testing.assert_close(seen, whole)
        expected = 3.0 * torch.arange(1, 7, dtype=torch.float64)[3 * rank : 3 * rank + 3]
        torch.testing.assert_close(gradient, expected.reshape(1, 1, 3))


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (LayerNorm(HIDDEN, 1e-5, TensorParallel()), nn.LayerNorm(HIDDEN, 1e-5)),
        (RMSNorm(HIDDEN, 1e-6, TensorParallel()), nn.RMSNorm(HIDDEN, 1e-6)),
    ],
    ids=["LayerNorm", "RMSNorm"],
)
def test_norms_at_size_one_are_torchs(ours: nn.Module, torchs: nn.Module) -> None:
    x = torch.randn(2, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
            mine.copy_(theirs)
    # the root mean square is summed in another order
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-6, atol=0)
