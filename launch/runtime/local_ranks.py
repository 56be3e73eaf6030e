"""Starts ranks on this machine through the DeepSpeed launcher, with a suitable environment."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence

from launch.runtime import host_probe
from launch.runtime.devices import cpu_count
from launch.runtime.modules import RANK
from launch.runtime.processes import ProcessTree, StopSignals, decode_launcher_exit_code, wait_for
from megalite.config import LaunchConfig

# glibc: no mmap for large blocks and no trimming, so that tensors reuse memory whose pages are already mapped; huge
# pages for it if the kernel gives them on request (glibc before 2.35 ignores that one)
MALLOC_TUNABLES = (
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"
)
LEFT_RANKS_S = 30.0  # for ranks whose launcher was killed; the launcher itself would wait as long


def rank_environment(
    options: LaunchConfig, ranks: int, on_gpu: bool, cores: int | None = None
) -> tuple[dict[str, str], str]:
    """Returns the variables to set for each rank, without those the user has set, and a sentence that explains them.

    `ranks` share the `cores` of one host, by default those of this one.
    """
    wanted: dict[str, str] = {}
    reasons = []
    if not on_gpu:
        wanted["DS_ACCELERATOR"] = "cpu"
    cores = cores or cpu_count()
    threads = max(1, cores // ranks) if options.threads_per_rank == "auto" else options.threads_per_rank
    wanted["OMP_NUM_THREADS"] = str(threads)
    reasons.append(f"{threads} thread{'s' * (threads > 1)} each")
    if options.malloc_tunables:
        wanted["GLIBC_TUNABLES"] = MALLOC_TUNABLES
        reasons.append("malloc keeps freed memory")
    fits = ranks * threads <= cores
    if options.spin_threads is True or (options.spin_threads == "auto" and fits and threads > 1 and not on_gpu):
        wanted["OMP_WAIT_POLICY"] = "active"
        reasons.append("threads spin between parallel regions")
    kept = [name for name in wanted if name in os.environ]
    if kept:
        reasons.append(f"{', '.join(kept)} as you set it")
    return {name: value for name, value in wanted.items() if name not in os.environ}, ", ".join(reasons)


def start_local_ranks(ranks: int, environment: dict[str, str], arguments: Sequence[str], module: str = RANK) -> int:
    """Runs `python -m MODULE ARGUMENTS` on `ranks` local ranks; returns the exit code once all have ended.

    The code is that of the first rank that did not end with 0; 128 + n if signal n ended it. SIGTERM, SIGUSR1, SIGUSR2
    and SIGHUP are forwarded to the ranks, which save and end. Ctrl-C and a second SIGTERM end them at once, without a
    save. Nothing is left running, even if this process or DeepSpeed's launcher is killed.
    """
    # the `deepspeed` command runs this on a single host; calling it directly saves a second import of DeepSpeed
    hosts = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", "--quiet", "--no_local_rank", "--node_rank", "0"]
    command += ["--world_info", hosts, "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command += ["--module", module, *arguments]
    with StopSignals() as signals, ProcessTree(command, os.environ | environment) as tree:
        # On SIGTERM DeepSpeed's launcher kills the ranks and exits with 1, so it gets the signal only if there are no
        # ranks. When a rank ends with a code other than 0, it sends SIGTERM to the others and exits with that code
        code = wait_for(
            tree, signals, ranks=tree.children, otherwise=lambda number: tree.process.terminate(), grace_s=None
        )
        tree.end(LEFT_RANKS_S)
    return decode_launcher_exit_code(code)


def free_port() -> int:
    """Returns a TCP port of this machine that is free at the moment."""
    return host_probe.free_port()["port"]
