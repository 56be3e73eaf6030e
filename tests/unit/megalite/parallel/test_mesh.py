from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.mesh import Mesh, stage_boundaries

SIZE = st.integers(1, 5)
LAYERS = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=9)


@given(tp=SIZE, pp=SIZE, dp=SIZE, cp=SIZE)
def test_rank_and_coordinate_are_inverse(tp: int, pp: int, dp: int, cp: int) -> None:
    mesh = Mesh(tp, pp, dp, cp)
    assert mesh.world_size == tp * pp * dp * cp
    for rank in range(mesh.world_size):
        at = mesh.coordinate(rank)
        assert mesh.rank(at.pipeline_rank, at.replica, at.tensor_rank) == rank
        assert at.replica == at.data_rank * cp + at.context_rank and at.context_rank < cp


@given(dp=SIZE, cp=SIZE, data=st.data())
def test_each_replica_shares_experts_with_its_neighbours_and_holds_the_same_as_others(
    dp: int, cp: int, data: st.DataObject
) -> None:
    ep = data.draw(st.sampled_from([size for size in range(1, dp * cp + 1) if not dp * cp % size]))
    mesh = Mesh(data_parallel_size=dp, context_parallel_size=cp, expert_parallel_size=ep)
    for replica in range(dp * cp):
        sharing, alike = mesh.sharing_experts(replica), mesh.with_experts_of(replica)
        assert set(sharing) & set(alike) == {replica}
        assert (len(sharing), len(alike)) == (ep, mesh.copies_of_experts)
        assert all(mesh.sharing_experts(other) == sharing for other in sharing)
        assert all(mesh.with_experts_of(other) == alike for other in alike)


def test_tensor_parallel_neighbours_are_adjacent_and_stages_furthest_apart() -> None:
    mesh = Mesh(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert [mesh.rank(0, 0, 1), mesh.rank(0, 1, 0), mesh.rank(1, 0, 0)] == [1, 2, 4]


def test_a_place_names_the_axes_that_are_cut() -> None:
    assert Mesh(tensor_parallel_size=2, pipeline_parallel_size=2).place(3) == "stage 1, tensor rank 1"
    assert Mesh(data_parallel_size=2).place(1) == "replica 1" and Mesh().place(0) == ""
    assert Mesh(data_parallel_size=2, context_parallel_size=2).place(3) == "replica 1, context rank 1"


def slowest(costs: list[float], bounds: tuple[int, ...]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


@given(layers=LAYERS, stages=st.integers(1, 4))
def test_no_other_cut_with_a_block_per_stage_is_faster(layers: list[tuple[int, bool]], stages: int) -> None:
    costs, is_block = [float(cost) for cost, _ in layers], [block for _, block in layers]
    count = len(layers)
    cuts = [(0, *inner, count) for inner in combinations(range(1, count), stages - 1)]
    allowed = [bounds for bounds in cuts if all(any(is_block[a:b]) for a, b in pairwise(bounds))]
    if not allowed:
        with pytest.raises(ValueError, match=f"{sum(is_block)} blocks cannot fill {stages} stages"):
            stage_boundaries(costs, is_block, stages)
        return
    found = stage_boundaries(costs, is_block, stages)
    assert found in allowed
    assert slowest(costs, found) == min(slowest(costs, bounds) for bounds in allowed)


def test_the_head_makes_the_last_stage_shorter() -> None:
    # embedding, 6 blocks, norm, a head as dear as two blocks
    costs, is_block = [0.0, *[1.0] * 6, 0.0, 2.0], [False, *[True] * 6, False, False]
    assert stage_boundaries(costs, is_block, 2) == (0, 5, 9)
