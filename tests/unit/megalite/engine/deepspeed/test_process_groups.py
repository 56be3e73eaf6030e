"""On NCCL all ranks wait for each other in every call that makes a group: an engine makes as many as it has kinds."""

from __future__ import annotations

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
    new_group, world = dist.new_group, dist.group

    def split_group(split_ranks: list[list[int]]) -> Any:
        made.append(split_ranks)
        world.WORLD.bound_device_id = None
        groups = [new_group(ranks) for ranks in split_ranks if dist.get_rank() in ranks]
        world.WORLD.bound_device_id = torch.device("cuda", 0)
        return groups[0] if groups else None

    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "new_group", lambda ranks: split_group([list(ranks)]))
    dist.init_process_group("fake", store=FakeStore(), rank=mesh.tensor_parallel_size, world_size=mesh.world_size)
    world.WORLD.bound_device_id = torch.device("cuda", 0)
    if pipelines := Grid(mesh).pipe_groups:
        PipelineGroups(pipelines, {(0, 1), (1, 2), (1, 0), (2, 1)})
        group_among([[ranks[0], ranks[-1]] for ranks in pipelines])  # of a tied weight
    dist.destroy_process_group()
    assert len(made) == calls < before, made
    assert all(len(ranks) > 1 for groups in made for ranks in groups), "a group of one rank"
