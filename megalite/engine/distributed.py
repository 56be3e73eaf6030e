"""Joining and leaving the job's process group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

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

Value = TypeVar("Value")


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


def from_all_ranks(value: Value) -> list[Value]:
    """What each rank holds, in order; collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_same_on_all_ranks(value: object) -> bool:
    """True where every rank holds an equal value; collective."""
    return all(other == value for other in from_all_ranks(value))


def from_rank_0(
    find: Callable[[], Value], errors: tuple[type[Exception], ...], otherwise: Callable[[str], Exception]
) -> Value:
    """What rank 0 finds, on every rank; collective. One of `errors` that it meets is raised by all, and of any other
    exception what `otherwise` makes of a sentence about it: nobody is left waiting."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [(_portable(find()), None)]
        except errors as error:
            told = [(None, error)]
        except Exception as error:
            told = [(None, otherwise(f"rank 0 could not decide for all ranks ({type(error).__name__}: {error})"))]
    dist.broadcast_object_list(told)
    found, problem = told[0]
    if problem is not None:
        raise problem
    return cast(Value, found)


def _portable(value: Value) -> Value:
    """Raises where other processes could not be told it."""
    pickle.loads(pickle.dumps(value))
    return value


def stop_distributed() -> None:
    """Leaves the process group together with all ranks: a launcher ends the others as soon as one has ended."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
