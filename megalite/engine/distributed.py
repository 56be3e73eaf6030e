"""Joining and leaving the job's process group."""

from __future__ import annotations

from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megalite.engine.seams import (
    keep_collective_uncompiled,
    keep_muon_uncompiled,
    process_groups,
    quiet_logging,
    set_timeout,
    timeout_of,
)


def start_distributed(local_rank: int, timeout: timedelta = timedelta(minutes=30)) -> torch.device:
    """Joins the process group that the launcher's environment describes; returns this rank's device."""
    quiet_logging()
    keep_muon_uncompiled()
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        keep_collective_uncompiled()
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False, timeout=timeout)
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
    return torch.device(accelerator.device_name(local_rank))


def group_timeout() -> timedelta:
    """How long a rank waits for others in one collective: what the job's process group was started with."""
    return timeout_of(dist.group.WORLD)


def share_timeout() -> None:
    """Gives every process group that there is the timeout of the job's own.

    DeepSpeed makes its groups without one, so they would have torch's: 30 minutes on gloo, 10 on NCCL.
    """
    timeout = group_timeout()
    for group in process_groups():
        set_timeout(group, timeout)


def is_same_on_all_ranks(value: object) -> bool:
    """True where every rank holds an equal value; collective."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def stop_distributed() -> None:
    """Leaves the process group together with all ranks: a launcher ends the others as soon as one has ended."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
