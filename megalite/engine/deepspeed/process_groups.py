"""Joining and leaving the run's process group, and its topology."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from megalite.config import ConfigError
from megalite.distributed.agreement import from_all_ranks
from megalite.distributed.errors import RendezvousFailed
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
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.mesh import Mesh


class Grid(PipelineParallelGrid):  # type: ignore[misc]
    """DeepSpeed's grid with what its plain engine needs of it, and runtime/pipe/topology.py lacks."""

    def __init__(self, mesh: Mesh) -> None:
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pipeline_parallel_size, num_mp=mesh.tensor_parallel_size, num_dp=mesh.data_parallel_size
        )
        super().__init__(process_group=dist.new_group(range(mesh.world_size)), topology=topology)

    def get_model_parallel_rank(self) -> int:
        """Returns the tensor-parallel rank: on the first of them ZeRO-3's norm counts what all of them hold alike.

        DeepSpeed's own is the rank among all ranks of a replica: only those of the first stage would be counted.
        """
        return int(self.get_slice_parallel_rank())

    def get_tensor_model_parallel_group(self) -> Any:
        """Returns the tensor-parallel group of this rank."""
        return self.get_slice_parallel_group()


def tensor_parallel_of(
    grid: PipelineParallelGrid, sequence_parallel: bool, *, sums_parameters_at_step: bool
) -> TensorParallel:
    """Returns the handle that layers are built with."""
    return TensorParallel(
        size=grid.get_slice_parallel_world_size(),
        rank=grid.get_slice_parallel_rank(),
        group=grid.get_slice_parallel_group(),
        sequence_parallel=sequence_parallel,
        sums_parameters_at_step=sums_parameters_at_step,
    )


def start_distributed(
    local_rank: int, timeout: timedelta = timedelta(minutes=30), rendezvous: Rendezvous | None = None
) -> torch.device:
    """Joins the process group of the ranks that meet at `rendezvous`; returns this rank's device.

    Without one, the ranks meet where the launcher's environment says. Raises RendezvousFailed, and ConfigError on a
    rank that is to compute on a GPU which torch cannot use.
    """
    quiet_logging()
    keep_muon_uncompiled()
    keep_optimizers_uncompiled()
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        keep_collective_uncompiled()
    elif not accelerator.is_available():
        raise ConfigError(
            f"DS_ACCELERATOR is {accelerator.device_name()}, and torch {torch.__version__} can use no GPU here: "
            "compare what it is built for (torch.version) with the driver, or set DS_ACCELERATOR=cpu"
        )
    else:
        accelerator.set_device(local_rank)
    device = torch.device("cpu" if on_cpu else accelerator.device_name(local_rank))
    backend = "gloo" if on_cpu else accelerator.communication_backend_name()
    if not dist.is_initialized():  # DeepSpeed, which takes no store, then leaves the group as it is
        rendezvous = rendezvous or Rendezvous(timeout)
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


def check_members(rendezvous: Rendezvous) -> None:
    """Checks that each member of the process group knows the attempt's secret; collective.

    Who can list the keys of the store finds torch's among them and can be in the group before a rank is. Raises
    RendezvousFailed, or MessageRefused for what is no proof at all.
    """
    if (secret := rendezvous.secret) is None:
        return
    proofs = from_all_ranks(secret.proof(f"member {rendezvous.rank}"), str)
    for rank, proof in enumerate(proofs):
        if not secret.proves(f"member {rank}", proof):
            raise RendezvousFailed(rendezvous.refusal(rank))


def group_timeout() -> timedelta:
    """Returns the timeout of one collective, with which the run's process group was started."""
    return timeout_of(dist.group.WORLD)


def share_timeout() -> None:
    """Sets the timeout of every process group to that of the run's own.

    DeepSpeed makes its groups without one, so they would have torch's: 30 minutes on gloo, 10 on NCCL.
    """
    timeout = group_timeout()
    for group in process_groups():
        set_timeout(group, timeout)


def stop_distributed() -> None:
    """Leaves the process group together with all ranks: a launcher ends the others as soon as one has ended."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
