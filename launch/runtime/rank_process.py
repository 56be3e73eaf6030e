"""Helpers for the process of a rank: error messages once per host, deterministic kernels, a safe exit."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from launch.runtime.rank_environment import ATTEMPT, Rank

GRACE_S = 5.0
LOST_OUTPUT_CODE = 120  # of Python when buffered output cannot be written


def tell_once(sentence: str, rank: Rank | None) -> None:
    """Prints an error once per host.

    The launcher ends all ranks when one has ended. So local rank 0 prints at once, and another rank only if it still
    runs GRACE_S later, because then the error is its own.
    """
    where = ""
    if rank is not None and rank.local_rank:
        time.sleep(GRACE_S)
        where = f"rank {rank.rank}: "
    print(f"megalite: error: {where}{sentence}", file=sys.stderr, flush=True)


def run_to_the_end(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits with its code, or with 1 if it raises, but without finalising the interpreter.

    Threads of gloo outlive `destroy_process_group` if something still references the group (DeepSpeed's globals;
    default arguments of torch.distributed.nn.functional). One that asks for the GIL during finalisation aborts the
    process, "terminate called without an active exception", and a finished run would end with code 134.
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
        if stream is not None:  # None: closed from the start
            stream.flush()


def is_left_alone(rank: Rank) -> bool:
    """Returns whether ranks on several hosts run under plain `deepspeed`, without a supervisor or scheduler."""
    supervised_by = (ATTEMPT, "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
    return rank.launcher == "deepspeed" and bool(rank.has_several_hosts) and not any(map(os.environ.get, supervised_by))


def be_deterministic() -> None:
    """Restricts this process to deterministic kernels. Call it before CUDA starts, when cuBLAS and NCCL read settings.

    Each rank calls it itself, because `deepspeed --hostfile` and torchrun do not know our config.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it for deterministic cuBLAS
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # switches would add numbers in order of arrival
    torch.use_deterministic_algorithms(True)  # raises for an operation without such a kernel
    # filling costs time, and this memory is never read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
