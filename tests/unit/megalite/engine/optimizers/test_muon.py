"""Muon's matrices: which they are, where they lie in cut parameters and partitions, and how they become orthogonal."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalite.engine.deepspeed.internals import FlatGroup
from megalite.engine.optimizers.muon import OwnPartition, is_orthogonalized, newton_schulz, orthogonalized, rate_factor
from megalite.parallel.shard import Shard


def _torchs_step(gradient: Tensor, adjust_lr: str) -> Tensor:
    """What torch.optim.Muon adds to a weight in its first step at rate 1: with momentum 0 it is the gradient's."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn=adjust_lr).step()
    return weight.detach()


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_equally_large_matrices_in_one_batch_are_as_torch_has_them_one_by_one(adjust_lr: str) -> None:
    """Tolerance: the order of a sum decides the last bit of bf16 here and there, and later products amplify it."""
    draw = torch.Generator().manual_seed(int(np.random.default_rng().integers(1 << 31)))
    shapes = [(33, 57), (57, 33), (40, 40), (1, 9)]
    matrices = {
        f"{shape} {copy}": torch.randn(shape, generator=draw).bfloat16() for shape in shapes for copy in range(2)
    }
    for name, matrix in orthogonalized(matrices).items():
        ours = -rate_factor(matrix.shape, adjust_lr) * matrix.float()
        theirs = _torchs_step(matrices[name].float(), adjust_lr)
        assert float((ours - theirs).abs().max()) < 0.05 * float(theirs.abs().max()), name


def test_singular_values_become_about_one() -> None:
    matrices = torch.randn(2, 24, 60).bfloat16()
    values = torch.linalg.svdvals(newton_schulz(matrices).float())
    assert values.min() > 0.5 and values.max() < 1.4
    assert not newton_schulz(torch.zeros(1, 4, 6, dtype=torch.bfloat16)).any(), "nothing is divided by zero"


def test_matrices_of_blocks_are_orthogonalized_and_nothing_else() -> None:
    names = {
        Shard((8, 4), 0, (("", 8),), 2, 0, name="model.layers.0.self_attn.o_proj.weight"): True,
        Shard((8, 4), 1, (("", 4),), 1, 0, name="model.layers.0.mlp.experts.down_proj.weight", stacked=3): True,
        Shard((8,), 0, (("", 8),), 2, 0, name="model.layers.0.self_attn.qkv_proj.bias"): False,
        Shard((8, 4), None, (("", 8),), 1, 0, name="model.layers.0.mlp.gate.weight"): False,
        Shard((8, 4), 0, (("", 8),), 2, 0, name="model.embed_tokens.weight"): False,
        Shard((8, 4), 0, (("", 8),), 2, 0, name="lm_head.weight"): False,
    }
    assert {shard: is_orthogonalized(shard) for shard in names} == names


# fused and padded sections, columns, and stacked experts: 7, 5 and 9 divide by neither 2 nor 4
FUSED = Shard((17, 6), 0, (("q_proj", 7), ("k_proj", 5), ("v_proj", 5)), 1, 0, name="model.layers.0.qkv.weight")
COLUMNS = Shard((6, 9), 1, (("", 9),), 1, 0, name="model.layers.0.down_proj.weight")
STACKED = Shard((14, 6), 0, (("gate", 7), ("up", 7)), 1, 0, name="model.layers.0.experts.gate_up.weight", stacked=3)
SHARDS = (FUSED, COLUMNS, STACKED)


def _local(shard: Shard, tensors: dict[str, Tensor]) -> Tensor:
    """A rank's parameter, with NaN in its padding."""
    local = torch.full(shard.local_shape, math.nan)
    for piece in shard.pieces():
        local[piece.target] = tensors[piece.name][piece.source]
    return local


@pytest.mark.parametrize(("tp", "replicas"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 5)])
def test_each_partition_sees_whole_matrices_without_padding_and_takes_its_own_numbers(tp: int, replicas: int) -> None:
    """All partitions of all tensor-parallel ranks together write every number once. A slice in place of the whole,
    q|k|v as one matrix or padding would have another shape or NaN."""
    tensors = {piece.name: torch.randn(piece.shape) for shard in SHARDS for piece in shard.pieces()}
    ranks = [[replace(s, tensor_parallel_size=tp, tensor_parallel_rank=rank) for s in SHARDS] for rank in range(tp)]
    flats = []
    for shards in ranks:
        flat = torch.cat([_local(shard, tensors).flatten() for shard in shards])
        flats.append(torch.cat([flat, torch.full((-len(flat) % replicas,), math.nan)]))
    length = len(flats[0]) // replicas
    for rank, shards in enumerate(ranks):
        whole = flats[rank].clone()
        parameters, start = [], 0
        for shard in shards:
            parameter = nn.Parameter(whole[start : start + math.prod(shard.local_shape)].view(shard.local_shape))
            parameter.shard = shard  # type: ignore[attr-defined]
            parameters.append(parameter)
            start += parameter.numel()
        for replica in range(replicas):
            mine = OwnPartition.of(FlatGroup(parameters, whole, None), replica, replicas)
            matrices = mine.matrices(torch.stack([flat[mine.gathered] for flat in flats]))
            for name, matrix in matrices.items():
                assert torch.equal(matrix, tensors[name]), name
            partition = flats[rank][replica * length : (replica + 1) * length].clone()
            for where, piece in mine.own:
                piece.of(partition[where]).sub_(matrices[piece.name][piece.source])
            assert not partition.nan_to_num(0.0).any(), "numbers of another place were taken, or some were not"
