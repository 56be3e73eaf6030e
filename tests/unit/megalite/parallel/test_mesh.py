from __future__ import annotations

from dataclasses import astuple

from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.mesh import Mesh

SIZE = st.integers(1, 5)


@given(tp=SIZE, pp=SIZE, dp=SIZE)
def test_rank_and_coordinate_are_inverse(tp: int, pp: int, dp: int) -> None:
    mesh = Mesh(tp, pp, dp)
    assert mesh.world_size == tp * pp * dp
    assert [mesh.rank(*astuple(mesh.coordinate(rank))) for rank in range(mesh.world_size)] == list(range(tp * pp * dp))


@given(tp=SIZE, pp=SIZE, dp=SIZE)
def test_the_order_is_deepspeeds(tp: int, pp: int, dp: int) -> None:
    # two orders would give layers one tensor-parallel group and DeepSpeed's gradient norm another
    mesh, theirs = Mesh(tp, pp, dp), PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    for rank in range(mesh.world_size):
        ours, coordinate = mesh.coordinate(rank), theirs.get_coord(rank)
        assert (ours.pipeline_rank, ours.data_rank, ours.tensor_rank) == (
            coordinate.pipe,
            coordinate.data,
            coordinate.model,
        )


def test_tensor_parallel_neighbours_are_adjacent_and_stages_furthest_apart() -> None:
    mesh = Mesh(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert [mesh.rank(0, 0, 1), mesh.rank(0, 1, 0), mesh.rank(1, 0, 0)] == [1, 2, 4]
