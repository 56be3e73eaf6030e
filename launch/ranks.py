"""What a rank says for its host or for the run, what it must be before it touches a device, and how it ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import NoReturn

from launch.rank_environment import Rank

GRACE_S = 5.0


def tell_once(sentence: str, rank: Rank | None) -> None:
    """The launcher ends all ranks when one has ended, so local rank 0 speaks before any other leaves; another speaks
    only when it is still here after that, because the mistake was its own."""
    where = ""
    if rank is not None and rank.local_rank:
        time.sleep(GRACE_S)
        where = f"rank {rank.rank}: "
    print(f"megalite: error: {where}{sentence}", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does, but for taking the interpreter apart under the threads of gloo.

    Of a group that something still holds (DeepSpeed's globals; default arguments of torch.distributed.nn.functional,
    read after joining) they outlive `destroy_process_group`. One that then asks for the interpreter's lock aborts the
    process, "terminate called without an active exception", and a run that is finished ends with code 134.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def is_left_alone(rank: Rank) -> bool:
    """Whether ranks on several hosts have nobody but `deepspeed` to look after them."""
    watched = ("MEGALITE_ATTEMPT", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
    return rank.launcher == "deepspeed" and bool(rank.has_several_hosts) and not any(map(os.environ.get, watched))


def be_deterministic() -> None:
    """Only kernels that give the same bits each time; before CUDA starts, because cuBLAS and NCCL read theirs then.

    Set by each rank itself: `deepspeed --hostfile` and torchrun know nothing of our config.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses what would not be deterministic
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # switches that sum do so in the order in which numbers arrive
    torch.use_deterministic_algorithms(True)  # an operation that has no such kernel ends the run
    # filling costs time, and nobody reads such memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
