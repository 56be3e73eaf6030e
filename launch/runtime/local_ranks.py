"""Starts ranks on this machine, with a suitable environment."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

from launch.errors import LaunchError
from launch.runtime import host_probe
from launch.runtime.devices import cpu_count
from launch.runtime.logs import get_logger
from launch.runtime.processes import ProcessTree, StopRequest, StopSignals, wait_for
from launch.runtime.started_modules import RANK, python_command
from megalite.config import LaunchConfig
from megalite.distributed.rank_admission import FOLDER, private_folder
from megalite.parallel.mesh import Mesh
from megalite.resilience.signals import PREEMPTED_CODE, exit_code_for
from megalite.units import plural

log = get_logger(__name__)

# glibc: no mmap for large blocks and no trimming, so that tensors reuse memory whose pages are already mapped; huge
# pages for it if the kernel gives them on request (glibc before 2.35 ignores that one)
MALLOC_TUNABLES = (
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"
)
THREADS = "OMP_NUM_THREADS"
COMPILE_WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"
# torch takes the first one of these that is set
ALLOCATOR_OPTIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LEFT_RANKS_S = 30.0  # for the other ranks when one has failed: they may still explain why, or write a checkpoint
OUT_OF_MEMORY = ", which the kernel sends when memory runs out: `dmesg` says whether it did"


def rank_settings(
    options: LaunchConfig, ranks: int, on_gpu: bool, cores: int | None = None
) -> tuple[dict[str, str], str]:
    """Returns the variables to set for each rank, without those the user has set, and a sentence that explains them.

    `ranks` share the `cores` of one host, by default those of this one. Raises LaunchError if the user has set a number
    of threads that is none.
    """
    users = os.environ.get(THREADS)
    # libgomp ignores what is no number and takes all cores for each rank; a list is for nested parallel regions
    if users is not None and not re.fullmatch(r"\s*0*[1-9]\d*\s*(,\s*0*[1-9]\d*\s*)*", users):
        raise LaunchError(f"{THREADS}={users} is no number of threads: set it to at least 1, or unset it")
    wanted: dict[str, str] = {}
    reasons = []
    wanted["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"  # else DeepSpeed takes a CPU where torch finds no GPU
    cores = cores or cpu_count()
    threads = max(1, cores // ranks) if options.threads_per_rank == "auto" else options.threads_per_rank
    if users:
        threads = int(users.partition(",")[0])
    wanted[THREADS] = str(threads)
    wanted[COMPILE_WORKERS] = str(min(32, max(1, cores // ranks)))  # torch starts up to 32 for each rank
    reasons.append(f"{plural(threads, 'thread')} each")
    if options.malloc_tunables:
        wanted["GLIBC_TUNABLES"] = MALLOC_TUNABLES
        reasons.append("malloc keeps freed memory")
    if on_gpu:
        own = [name for name in ALLOCATOR_OPTIONS if name in os.environ]
        wanted[own[0] if own else ALLOCATOR_OPTIONS[-1]] = "expandable_segments:True"
        if not own:
            reasons.append("GPU memory in segments that grow, so that less of it is lost in gaps")
    fits = ranks * threads <= cores
    if options.spin_threads is True or (options.spin_threads == "auto" and fits and threads > 1 and not on_gpu):
        wanted["OMP_WAIT_POLICY"] = "active"
        reasons.append("threads spin between parallel regions")
    if unused := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]:  # as torchrun's ranks do
        reasons.append(f"they meet on a port of their own, and {' and '.join(unused)} as you set it changes nothing")
    kept = [name for name in wanted if name in os.environ]
    if kept:
        reasons.append(f"{', '.join(kept)} as you set it")
    return {name: value for name, value in wanted.items() if name not in os.environ}, ", ".join(reasons)


def start_local_ranks(mesh: Mesh, environment: dict[str, str], arguments: Sequence[str], module: str = RANK) -> int:
    """Runs `python -m MODULE ARGUMENTS` on the local ranks of `mesh`; returns the exit code once all have ended.

    The code is that of the first rank that did not end with 0; 128 + n if signal n ended it, which an error says. The
    other ranks get SIGTERM then, and SIGKILL LEFT_RANKS_S later. Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 go on to
    the ranks, which save and end; a second Ctrl-C, SIGTERM or SIGHUP ends them at once, without a save. Nothing is left
    running, even if this process is killed.
    """
    count = str(mesh.world_size)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": count}
    # torch's and DeepSpeed's names; DeepSpeed takes the last two from its own launcher
    shared |= {"LOCAL_WORLD_SIZE": count, "LOCAL_SIZE": count, "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(mesh.world_size)]
    command, stop = python_command(module, *arguments), StopRequest(grace_s=None)
    with StopSignals() as signals, private_folder() as folder:
        shared[FOLDER] = str(folder)
        with ProcessTree(command, os.environ | environment | shared, copies=numbers) as tree:
            code = wait_for(tree, signals, stop, ranks=tree.commands)
            _log_killed([process.returncode for process in tree.processes], mesh, stop)  # before the others are ended
            tree.end(LEFT_RANKS_S, until=signals.take)
    return _documented_code(code, stop)


def _log_killed(codes: Sequence[int | None], mesh: Mesh, stop: StopRequest) -> None:
    """Names the ranks that a signal has ended, unless it is one that the command itself has passed on."""
    own = {stop.signal, signal.SIGTERM, *((signal.SIGKILL,) if stop.is_urgent else ())} if stop.signal else set()
    for rank, code in enumerate(codes):
        number = -(code or 0)
        if number <= 0 or number in own:
            continue
        where = f" ({place})" if (place := mesh.place(rank)) else ""
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = OUT_OF_MEMORY if number == signal.SIGKILL else ""
        log.error(f"rank {rank}{where} was ended by {name}{hint}; what it said is above, in lines with `rank {rank}`")


def _documented_code(code: int, stop: StopRequest) -> int:
    """Returns the exit code of ranks that were asked to end; says what they could not say themselves."""
    if stop.first is None or stop.signal is None:
        return code
    if stop.is_urgent:
        log.warning("all ranks were ended at once: what was not saved is lost")
        return code
    if code == 128 + signal.SIGTERM or (code == 128 + stop.signal and not stop.was_interrupted):
        # the ranks did not take signals yet
        name = "interrupted" if stop.was_interrupted else f"ended by {signal.Signals(stop.first).name}"
        log.warning(f"{name} before the ranks had started")
        return exit_code_for(stop.first)
    return exit_code_for(stop.first) if code == PREEMPTED_CODE else code


def free_port() -> int:
    """Returns a TCP port of this machine that is free at the moment."""
    return host_probe.free_port()["port"]
