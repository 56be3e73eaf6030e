"""Process groups of a layout, made by DeepSpeed's grid in the order of `megalite.parallel.mesh`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.mesh import Mesh


def topology_of(mesh: Mesh) -> PipeModelDataParallelTopology:
    """DeepSpeed's description of the mesh: axes pipe, data, model."""
    return PipeModelDataParallelTopology(
        num_pp=mesh.pipeline_parallel_size, num_mp=mesh.tensor_parallel_size, num_dp=mesh.data_parallel_size
    )


class Grid(PipelineParallelGrid):  # type: ignore[misc]
    """DeepSpeed's grid with the one accessor it lacks (runtime/pipe/topology.py has only the rank and size)."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(process_group=dist.new_group(range(mesh.world_size)), topology=topology_of(mesh))

    def get_tensor_model_parallel_group(self) -> Any:
        """The tensor-parallel group of this rank."""
        return self.get_slice_parallel_group()


def tensor_parallel_of(grid: PipelineParallelGrid, sequence_parallel: bool) -> TensorParallel:
    """The handle that layers are built with."""
    return TensorParallel(
        size=grid.get_slice_parallel_world_size(),
        rank=grid.get_slice_parallel_rank(),
        group=grid.get_slice_parallel_group(),
        sequence_parallel=sequence_parallel,
    )
