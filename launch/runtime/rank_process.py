"""Helpers for the process of a rank: its network, error messages once per host, deterministic kernels, a safe exit."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import NoReturn

import psutil

from launch.errors import LaunchError
from launch.runtime.printing import print_exception, say
from launch.runtime.rank_environment import Rank
from launch.runtime.start_witness import witness
from megalite.distributed.rank_admission import ATTEMPT, is_loopback_address, is_served, use_loopback

INTERFACE = "GLOO_SOCKET_IFNAME"
DISTANT_ADDRESS = "192.0.2.1"  # reserved for documentation: its route is that to any distant host
GRACE_S = 5.0
LOST_OUTPUT_CODE = 120  # of Python when buffered output cannot be written


def log_once(sentence: str, rank: Rank | None) -> None:
    """Prints an error once per host.

    The launcher ends all ranks when one has ended. So local rank 0 prints at once, and another rank only if it still
    runs GRACE_S later, because then the error is its own.
    """
    where = ""
    if rank is not None and rank.local_rank:
        time.sleep(GRACE_S)
        where = f"rank {rank.rank}: "
    say(f"megalite: error: {where}{sentence}", file=sys.stderr, flush=True)


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
        print_exception(*sys.exc_info())
        witness.end()  # which has been told why
    for step in (threading._shutdown, _end_compile_workers, atexit._run_exitfuncs, _flush):  # type: ignore[attr-defined]
        try:
            step()
        except (Exception, KeyboardInterrupt):
            print_exception(*sys.exc_info())
            code = code or (LOST_OUTPUT_CODE if step is _flush else 0)
    os._exit(code)


def _end_compile_workers() -> None:
    """Kills the processes in which torch compiles, which it would ask to end and then wait for, up to 300 s.

    If they have only just started, as where a short run finds all its code in the cache, they do not end under Python
    3.12: it starts no thread in an interpreter that ends, and torch's needs one (torch/_inductor/compile_worker).
    """
    compiler = sys.modules.get("torch._inductor.async_compile")
    for pool in () if compiler is None else compiler._pool_set:
        pool.running = False  # its threads neither wait for it nor warn that it is gone
        for process in (*psutil.Process(pool.process.pid).children(recursive=True), pool.process):
            process.kill()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: closed from the start
            stream.flush()


def is_unsupervised(rank: Rank) -> bool:
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


def choose_interface(environment: MutableMapping[str, str], rank: Rank, wanted: str = "auto") -> None:
    """Decides in `environment` on which interface ranks communicate, and rank 0's host waits for the others.

    Ranks of one host meet on loopback and stay there. Among several hosts gloo listens on the address that the host's
    own name resolves to. Debian writes `127.0.1.1 NAME` into /etc/hosts, and then other hosts wait for this one until
    everything times out, so gloo gets the interface on the way to rank 0. NCCL chooses well by itself. An interface
    that is `wanted` by name is for both, but for what the environment says already. Raises LaunchError if there is none
    of this name.
    """
    master, _ = rank.master
    is_by_torchrun = is_served(environment)  # at the address that it has chosen
    if rank.has_several_hosts is False or rank.world_size == 1:
        use_loopback(environment)
        if not is_by_torchrun and not is_loopback_address(master):
            environment["MASTER_ADDR"] = "127.0.0.1"
        return
    if rank.has_several_hosts is None and is_loopback_address(master):
        return
    if wanted != "auto":
        if wanted not in (known := psutil.net_if_addrs()):
            host, names = socket.gethostname(), ", ".join(known)
            raise LaunchError(f"launch.interface is {wanted}, and {host} has none of this name: it has {names}")
        environment.setdefault(INTERFACE, wanted)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={wanted}")
    elif INTERFACE not in environment and is_loopback(socket.gethostname()) and (name := interface_to(master)):
        environment[INTERFACE] = name
    if not is_by_torchrun and not is_loopback_address(master) and (own := _own_master(rank, wanted)) is not None:
        environment["MASTER_ADDR"] = own


def _own_master(rank: Rank, wanted: str) -> str | None:
    """Returns the address where the ranks of this host meet the others, if MASTER_ADDR is a name of this host.

    Other hosts may take a name for another address of this one: Debian's own name is loopback to itself alone, and a
    host has addresses in several networks. So it is the one on the interface that is wanted, or the only one; None if
    there are several. Behind a NAT rank 0 does not have the address that others use. Raises LaunchError if MASTER_ADDR
    is this host's on another interface than the one that is wanted.
    """
    master, _ = rank.master
    named, own = set(_addresses(master)), _own_addresses()
    here = {name for name, ours in own.items() if named & ours}
    if wanted != "auto" and here and wanted not in here and not is_loopback(master):
        raise LaunchError(
            f"launch.interface is {wanted}, but {master}, where the ranks meet, is on {', '.join(sorted(here))}: set "
            "MASTER_ADDR to an address of the same interface"
        )
    is_hidden = bool(named) and is_loopback(master) and rank.has_several_hosts is True
    is_mine = bool(here) or is_hidden or (wanted != "auto" and rank.rank == 0 and bool(named))
    if not is_mine or (here and master in named):
        return None
    if wanted != "auto":
        return min(named & own[wanted] or own[wanted], default=None)
    outer = {address for ours in own.values() for address in ours if not ipaddress.ip_address(address).is_loopback}
    return outer.pop() if len(outer) == 1 else None


def is_loopback(host: str) -> bool:
    """Returns whether `host` resolves to loopback addresses only; true for an unknown name as well."""
    return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host))


def interface_to(master: str) -> str | None:
    """Returns the interface on the route to `master`, or to all others if that is this host; None if it is unknown."""
    target = next(
        (address for address in _addresses(master) if not ipaddress.ip_address(address).is_loopback), DISTANT_ADDRESS
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing, but makes the kernel choose the route
            own = {probe.getsockname()[0]}
        except OSError:
            own = set()
    outward = {name: ours for name, ours in _own_addresses().items() if any(not a.startswith("127.") for a in ours)}
    found = [name for name, ours in outward.items() if ours & own] or list(outward)
    return found[0] if len(found) == 1 else None


def _own_addresses() -> dict[str, set[str]]:
    """Returns the IPv4 addresses of each interface of this host."""
    return {
        name: {one.address for one in addresses if one.family == socket.AF_INET}
        for name, addresses in psutil.net_if_addrs().items()
    }


def _addresses(host: str) -> list[str]:
    """Returns the IPv4 addresses of a host; none for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]
