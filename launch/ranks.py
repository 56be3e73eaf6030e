"""What a rank says for its host or for the run, what it must be before it touches a device, and how it ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from launch.rank_environment import Rank

GRACE_S = 5.0
LOST_OUTPUT_CODE = 120  # as Python ends where what was printed cannot be written


def tell_once(sentence: str, rank: Rank | None) -> None:
    """The launcher ends all ranks when one has ended, so local rank 0 speaks before any other leaves; another speaks
    only when it is still here after that, because the mistake was its own."""
    where = ""
    if rank is not None and rank.local_rank:
        time.sleep(GRACE_S)
        where = f"rank {rank.rank}: "
    print(f"megalite: error: {where}{sentence}", file=sys.stderr, flush=True)


def run_to_the_end(main: Callable[[], int]) -> NoReturn:
    """Runs what a rank does and ends this process with its code, or with 1 where it raises, as `sys.exit` would, but
    for taking the interpreter apart under the threads of gloo.

    Of a group that something still holds (DeepSpeed's globals; default arguments of torch.distributed.nn.functional,
    read after joining) they outlive `destroy_process_group`. One that then asks for the interpreter's lock aborts the
    process, "terminate called without an active exception", and a run that is finished ends with code 134.
    """
    code = 1
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
    for step in (threading._shutdown, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        try:
            step()
        except (Exception, KeyboardInterrupt):
            sys.excepthook(*sys.exc_info())
            code = code or (LOST_OUTPUT_CODE if step is _flush else 0)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed from the start
            stream.flush()


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
