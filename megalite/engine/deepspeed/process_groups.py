"""Joining and leaving the run's process group, and its topology."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from megalite.config import ConfigError, ResolvedLayout
from megalite.distributed.rendezvous import Rendezvous
from megalite.engine.deepspeed.internals import (
    keep_collective_uncompiled,
    keep_muon_uncompiled,
    process_groups,
    quiet_logging,
    set_timeout,
    timeout_of,
)
from megalite.engine.deepspeed.uncompiled_optimizers import keep_optimizers_uncompiled
from megalite.parallel.collectives import ContextParallel, RankGroup
from megalite.parallel.mesh import Mesh


class Grid(PipelineParallelGrid):  # type: ignore[misc]
    """DeepSpeed's grid (runtime/pipe/topology.py), which makes each group of an axis by a call of its own.

    Here an axis that is not cut has none, as in ZeRO's comm/pg_utils.py, but replicas, whose None would mean all ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        tp, pp, dp = mesh.tensor_parallel_size, mesh.pipeline_parallel_size, mesh.replicas
        self._topo = topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
        self.slice_parallel_size, self.pipe_parallel_size, self.data_parallel_size = tp, pp, dp
        self.global_rank, self.ds_model_world_size = dist.get_rank(), pp * tp
        self.data_parallel_id, self.ds_model_rank = self.get_data_parallel_id(), self.get_slice_parallel_rank()
        self.dp_proc_group = group_among(topology.get_axis_comm_lists("data"))
        self.dp_group = dist.get_process_group_ranks(self.dp_proc_group)
        self.pipe_groups = topology.get_axis_comm_lists("pipe") if pp > 1 else []  # of all pipelines, by stage
        self.pp_proc_group = group_among(self.pipe_groups)
        self.slice_proc_group = group_among(topology.get_axis_comm_lists("model") if tp > 1 else [])
        self.ds_model_proc_group = self.pp_proc_group or self.slice_proc_group  # of a replica: DeepSpeed's norm
        if pp > 1 and tp > 1:
            self.ds_model_proc_group = group_among([topology.get_axis_list("data", replica) for replica in range(dp)])
        cp = mesh.context_parallel_size
        of_weights = topology.get_axis_comm_lists("data") if cp > 1 else []  # ranks of one are in order of replicas
        self._context_rank = mesh.coordinate(dist.get_rank()).context_rank
        self._context_group = group_among([ranks[at : at + cp] for ranks in of_weights for at in range(0, dp, cp)])
        ep = mesh.expert_parallel_size
        of_weights = topology.get_axis_comm_lists("data") if ep > 1 else []
        self._expert_rank = mesh.coordinate(dist.get_rank()).replica % ep
        self._experts_group = group_among([ranks[at : at + ep] for ranks in of_weights for at in range(0, dp, ep)])
        self.same_experts_group = group_among([ranks[at::ep] for ranks in of_weights for at in range(ep)])

    def context_parallel(self, layout: ResolvedLayout) -> ContextParallel:
        """Returns the ranks that share this one's sequences."""
        size, kind = layout.context_parallel_size, layout.context_parallel_kind
        return ContextParallel(size, self._context_rank, self._context_group, kind)

    def experts(self, layout: ResolvedLayout) -> RankGroup:
        """Returns the ranks that have this one's layers' experts between them."""
        return RankGroup(layout.expert_parallel_size, self._expert_rank, self._experts_group)


def group_among(groups: Sequence[Sequence[int]]) -> Any:
    """Returns this rank's one of disjoint groups, which NCCL makes by one split; None if it is in none. Collective over
    all ranks."""
    assert dist.group.WORLD is not None
    if groups and dist.group.WORLD.bound_device_id is not None:
        return dist.split_group(split_ranks=[sorted(ranks) for ranks in groups])
    made = [(ranks, dist.new_group(sorted(ranks))) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def start_distributed(
    local_rank: int, timeout: timedelta = timedelta(minutes=30), rendezvous: Rendezvous | None = None
) -> torch.device:
    """Joins the process group of the ranks that meet at `rendezvous`; returns this rank's device.

    Without one, the ranks meet where the launcher's environment says. Raises RendezvousFailed, and ConfigError on a
    rank that is to compute on a GPU which torch cannot use, or where DeepSpeed has found another accelerator.
    """
    quiet_logging()
    keep_muon_uncompiled()
    keep_optimizers_uncompiled()
    accelerator = get_accelerator()
    on_cpu = (name := accelerator.device_name()) == "cpu"
    if on_cpu:
        keep_collective_uncompiled()
    elif name != "cuda":
        raise ConfigError(f"DeepSpeed has chosen {name}, which is not supported: set DS_ACCELERATOR to cpu or cuda")
    elif not accelerator.is_available():
        raise ConfigError(
            f"DS_ACCELERATOR is {name}, and torch {torch.__version__} can use no GPU here: "
            "compare what it is built for (torch.version) with the driver, or set DS_ACCELERATOR=cpu"
        )
    else:
        accelerator.set_device(local_rank)
    device = torch.device("cpu" if on_cpu else accelerator.device_name(local_rank))
    backend = "gloo" if on_cpu else accelerator.communication_backend_name()
    if not dist.is_initialized():  # DeepSpeed, which takes no store, then leaves the group as it is
        rendezvous = rendezvous or Rendezvous(timeout)
        # messages of a pipeline's groups are meant to run one after the other: `PipelineGroups`
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        dist.init_process_group(
            backend,
            store=rendezvous.store,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timeout,
            # as DeepSpeed's comm/torch.py does: NCCL then splits the groups that are made later
            device_id=device if device.type == "cuda" and rendezvous.world_size > 1 else None,
        )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    return device


def group_timeout() -> timedelta:
    """Returns the timeout of one collective, with which the run's process group was started."""
    return timeout_of(dist.group.WORLD)


def share_timeout() -> None:
    """Sets the timeout of every process group to that of the run's own.

    They are made without one, some by DeepSpeed, so they would have torch's: 30 minutes on gloo, 10 on NCCL.
    """
    timeout = group_timeout()
    for group in process_groups():
        set_timeout(group, timeout)


def stop_distributed() -> None:
    """Leaves the process group together with all ranks: a launcher ends the others as soon as one has ended."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:  # NCCL warns that one rank, whose group is bound to no device, guesses one
            dist.barrier()
        dist.destroy_process_group()
