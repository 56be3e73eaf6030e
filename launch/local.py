"""Ranks on this machine, started through the DeepSpeed launcher in an environment that suits them."""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from collections.abc import Sequence

from launch.devices import cpu_count
from launch.processes import ProcessTree, StopSignals, told_by_launcher, wait_for
from megalite.config import LaunchConfig

# glibc: no mmap for large blocks and no trimming, so that tensors reuse memory whose pages are mapped already; huge
# pages for it where the kernel gives them on request (an older glibc than 2.35 ignores that one)
MALLOC_TUNABLES = (
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"
)
LEFT_RANKS_S = 30.0  # for ranks whose launcher was killed; as long as it gives them itself


def rank_environment(
    options: LaunchConfig, ranks: int, on_gpu: bool, cores: int | None = None
) -> tuple[dict[str, str], str]:
    """Variables set for each rank unless the user has set them, and a sentence that says which and why.

    `ranks` share the `cores` of one host; without, this one's.
    """
    wanted: dict[str, str] = {}
    said = []
    if not on_gpu:
        wanted["DS_ACCELERATOR"] = "cpu"
    cores = cores or cpu_count()
    threads = max(1, cores // ranks) if options.threads_per_rank == "auto" else options.threads_per_rank
    wanted["OMP_NUM_THREADS"] = str(threads)
    said.append(f"{threads} thread{'s' * (threads > 1)} each")
    if options.malloc_tunables:
        wanted["GLIBC_TUNABLES"] = MALLOC_TUNABLES
        said.append("malloc keeps freed memory")
    fits = ranks * threads <= cores
    if options.spin_threads is True or (options.spin_threads == "auto" and fits and threads > 1 and not on_gpu):
        wanted["OMP_WAIT_POLICY"] = "active"
        said.append("threads spin between parallel regions")
    kept = [name for name in wanted if name in os.environ]
    if kept:
        said.append(f"{', '.join(kept)} as you set it")
    return {name: value for name, value in wanted.items() if name not in os.environ}, ", ".join(said)


def start_local_ranks(
    ranks: int, environment: dict[str, str], arguments: Sequence[str], module: str = "launch.train"
) -> int:
    """Runs `python -m MODULE ARGUMENTS` on `ranks` local ranks; returns the exit code once all have ended.

    That code is the one of the first rank that did not end with 0; 128 + n where signal n ended it. SIGTERM, SIGUSR1,
    SIGUSR2 and SIGHUP are for the ranks alone, which save and end. Ctrl-C ends them at once, without a save, and so
    does a second SIGTERM. Nothing is left running, also when this process or DeepSpeed's launcher is killed.
    """
    # what the `deepspeed` command itself runs on a single host, without a second import of DeepSpeed before it
    hosts = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", "--quiet", "--no_local_rank", "--node_rank", "0"]
    command += ["--world_info", hosts, "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command += ["--module", module, *arguments]
    with StopSignals() as signals, ProcessTree(command, os.environ | environment) as tree:
        # DeepSpeed's launcher answers SIGTERM by ending the ranks and with code 1, so it gets none that ranks can have.
        # It collects them: at the first code other than 0 it sends SIGTERM to the rest and takes that code
        code = wait_for(
            tree, signals, ranks=tree.children, otherwise=lambda number: tree.process.terminate(), grace_s=None
        )
        tree.end(LEFT_RANKS_S)
    return told_by_launcher(code)


def free_port() -> int:
    """A TCP port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
