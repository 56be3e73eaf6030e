"""On NCCL all ranks wait for each other in every call that makes a group, as it splits the communicator of all: an
engine makes as many calls as it has kinds of groups, whatever the number of ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalite.engine.deepspeed.process_groups import Grid, group_among
from megalite.engine.pipeline.stage_messages import PipelineGroups
from megalite.parallel.mesh import Mesh


@pytest.mark.parametrize(
    ("mesh", "before", "calls"), [(Mesh(8, 4, 2), 139, 9), (Mesh(1, 1, 64), 194, 1), (Mesh(8, 8, 16), 977, 9)], ids=str
)
def test_a_kind_of_groups_is_one_call(mesh: Mesh, before: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`before`: with a call for each group, and groups of one rank. No other rank is there, and no GPU."""
    made: list[list[list[int]]] = []
    new_group = dist.new_group

    def split_group(split_ranks: list[list[int]]) -> Any:
        made.append(split_ranks)
        dist.group.WORLD.bound_device_id = None
        own = next((ranks for ranks in split_ranks if dist.get_rank() in ranks), None)
        group = own and new_group(own)
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        return group

    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "new_group", lambda ranks: split_group([list(ranks)]))
    for rank in (0, mesh.tensor_parallel_size, mesh.world_size - 1):
        made.clear()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        pipelines = Grid(mesh).pipe_groups
        if pipelines:
            neighbours = set(pairwise(range(mesh.pipeline_parallel_size)))
            PipelineGroups(pipelines, neighbours | {(after, before) for before, after in neighbours})
            group_among([[ranks[0], ranks[-1]] for ranks in pipelines])  # of a tied weight
        dist.destroy_process_group()
        assert len(made) == calls < before, made
        for groups in made:
            assert all(len(ranks) > 1 for ranks in groups), "a group of one rank"
            assert len({one for ranks in groups for one in ranks}) == sum(map(len, groups)), "not disjoint"
