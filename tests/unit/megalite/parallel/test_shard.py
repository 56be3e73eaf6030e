from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.shard import Shard

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def fused(sizes: list[int], other: int, dim: int, tp: int, rank: int) -> Shard:
    """A weight of `len(sizes)` fused projections, cut along `dim`."""
    sections = tuple((f"part{i}" if len(sizes) > 1 else "", size) for i, size in enumerate(sizes))
    shape = (sum(sizes), other) if dim == 0 else (other, sum(sizes))
    return Shard(shape, dim, sections, tp, rank, name="block.fused.weight")


@given(sizes=SIZES, other=st.integers(1, 3), dim=st.sampled_from([0, 1]), tp=st.integers(1, 9))
def test_ranks_hold_every_number_once_and_padding_is_nobodys(sizes: list[int], other: int, dim: int, tp: int) -> None:
    # a number held twice is saved twice and counted twice in a norm; one held by nobody keeps its initial value
    held: dict[str, np.ndarray] = {}
    for rank in range(tp):
        shard = fused(sizes, other, dim, tp, rank)
        local = np.zeros(shard.local_shape, dtype=int)
        for piece in shard.pieces():
            whole = held.setdefault(piece.name, np.zeros(piece.shape, dtype=int))
            assert whole[piece.source].shape == local[piece.target].shape
            assert all(0 <= s.start < s.stop <= n for s, n in zip(piece.source, piece.shape, strict=True))
            assert all(0 <= s.start < s.stop <= n for s, n in zip(piece.target, shard.local_shape, strict=True))
            whole[piece.source] += 1
            local[piece.target] += 1
        assert local.max(initial=0) <= 1, "two pieces share a place in the local parameter"
    names = ["block.fused.weight"] if len(sizes) == 1 else [f"block.part{i}.weight" for i in range(len(sizes))]
    assert sorted(held) == sorted(names)
    for name, size in zip(names, sizes, strict=True):
        assert held[name].shape == ((size, other) if dim == 0 else (other, size))
        assert (held[name] == 1).all(), f"{name}: {held[name]}"


@given(sizes=SIZES, tp=st.integers(1, 9), dim=st.sampled_from([0, 1]))
def test_all_ranks_have_the_same_local_shape(sizes: list[int], tp: int, dim: int) -> None:
    # collectives over the group need equal shapes
    shapes = {fused(sizes, 5, dim, tp, rank).local_shape for rank in range(tp)}
    assert len(shapes) == 1
    assert shapes.pop()[dim] == sum(-(-size // tp) for size in sizes)


@given(size=st.integers(1, 40), tp=st.integers(1, 9))
def test_a_replicated_parameter_is_whole_on_every_rank(size: int, tp: int) -> None:
    for rank in range(tp):
        shard = Shard((size,), None, (("", size),), tp, rank, "ones")
        (piece,) = shard.pieces()
        assert shard.is_replicated
        assert shard.local_shape == piece.shape == (size,)
        assert piece.source == piece.target == (slice(0, size),)


@given(
    tp=st.integers(1, 4),
    dim=st.sampled_from([0, 1, None]),
    sections=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    other=st.integers(1, 7),
    cuts=st.integers(1, 5),
    stacked=st.sampled_from([(None, 1), (1, 1), (3, 1), (3, 3), (6, 2)]),
)
def test_ranges_of_all_ranks_cover_every_global_number_once(
    tp: int, dim: int | None, sections: list[int], other: int, cuts: int, stacked: tuple[int | None, int]
) -> None:
    """ZeRO cuts what other axes left, at any number: what all ranks' ranges name is the whole, once, and `of` finds
    each block's numbers where the local parameter has them."""
    if dim is None:
        sections = sections[:1]
    along = sum(sections)
    shape = (other, along) if dim == 1 else (along, other)
    named = tuple((f"s{i}" if len(sections) > 1 else "", size) for i, size in enumerate(sections))
    seen: dict[str, np.ndarray] = {}
    count, ep = stacked
    for rank, dealt in itertools.product(range(tp if dim is not None else 1), range(ep)):
        shard = Shard(shape, dim, named, tp, rank, "normal", "a.b.weight", count, ep, dealt)
        local = np.full(shard.local_shape, -1)
        for piece in shard.pieces():  # each number is its own address in the global tensor
            whole = np.arange(np.prod(piece.shape)).reshape(piece.shape)
            local[piece.target] = whole[piece.source]
        flat = torch.from_numpy(local.flatten())
        bounds = [len(flat) * cut // cuts for cut in range(cuts + 1)]
        for start, stop in itertools.pairwise(bounds):
            for piece in shard.pieces_of_range(start, stop):
                block = piece.of(flat[start:stop]).numpy()
                counts = seen.setdefault(piece.name, np.zeros(piece.shape, int))
                counts[piece.source] += 1
                addresses = np.arange(counts.size).reshape(counts.shape)
                assert (block == addresses[piece.source]).all()
    assert len(seen) == len(sections) * (count or 1) and all((counts == 1).all() for counts in seen.values())


def test_a_stack_is_named_and_cut_like_its_tensors_alone() -> None:
    """Old checkpoints and folders hold each expert's weights by these names."""
    cut = Shard((6, 4), 0, (("gate_proj", 3), ("up_proj", 3)), 2, 1)
    stack = replace(cut, name="mlp.experts.up_projections.weight", stacked=2)
    assert stack.local_shape == (2, 4, 4)
    for number, pieces in enumerate(zip(*[stack.pieces()] * 2, strict=True)):
        alone = list(replace(cut, name=f"mlp.experts.{number}.up_projections.weight").pieces())
        assert [piece.name for piece in pieces] == [
            f"mlp.experts.{number}.{part}_proj.weight" for part in ("gate", "up")
        ]
        assert list(pieces) == [replace(piece, target=(number, *piece.target)) for piece in alone]
