"""The mesh of ranks: the one expression that relates a global rank to its pipeline, data and tensor coordinates.

In: the three sizes. Out: coordinates and ranks. Pure integers, no torch: dry runs and the planner use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from megalite.config import ResolvedLayout


@dataclass(frozen=True)
class Coordinate:
    """Position of one rank on the three axes."""

    pipeline_rank: int
    data_rank: int
    tensor_rank: int


@dataclass(frozen=True)
class Mesh:
    """The three sizes of a layout; tensor-parallel neighbours are adjacent ranks, stages are furthest apart.

    The order is DeepSpeed's `PipeModelDataParallelTopology` (pipe, data, model), so that both agree on every group.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @classmethod
    def of(cls, layout: ResolvedLayout) -> Self:
        """Takes the sizes from a resolved layout."""
        return cls(layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def rank(self, pipeline_rank: int, data_rank: int, tensor_rank: int) -> int:
        """Returns the global rank of a coordinate."""
        return (pipeline_rank * self.data_parallel_size + data_rank) * self.tensor_parallel_size + tensor_rank

    def coordinate(self, rank: int) -> Coordinate:
        """Returns the coordinate of a global rank, the inverse of `rank`."""
        outer, tensor_rank = divmod(rank, self.tensor_parallel_size)
        pipeline_rank, data_rank = divmod(outer, self.data_parallel_size)
        return Coordinate(pipeline_rank, data_rank, tensor_rank)

    def __str__(self) -> str:
        return f"tp={self.tensor_parallel_size} pp={self.pipeline_parallel_size} dp={self.data_parallel_size}"
