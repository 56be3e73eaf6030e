"""Ranks on this machine, started through the DeepSpeed launcher in an environment that suits them."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from launch.devices import cpu_count
from megalite.config import LaunchConfig

# glibc: no mmap for large blocks and no trimming, so that tensors reuse memory whose pages are mapped already; huge
# pages for it where the kernel gives them on request (an older glibc than 2.35 ignores that one)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MALLOC_TUNABLES = (
    "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"
)


def rank_environment(options: LaunchConfig, ranks: int, on_gpu: bool) -> tuple[dict[str, str], str]:
    """Variables set for each rank unless the user has set them, and a sentence that says which and why."""
    wanted: dict[str, str] = {}
    said = []
    if not on_gpu:
        wanted["DS_ACCELERATOR"] = "cpu"
    cores = cpu_count()
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


def start_local_ranks(ranks: int, environment: dict[str, str], arguments: Sequence[str]) -> int:
    """Runs `launch.train ARGUMENTS` on `ranks` local ranks; returns the exit code once all have ended.

    SIGTERM, SIGINT and SIGHUP are passed on, and a SIGKILL reaches the launcher too: nothing is left running.
    """
    # what the `deepspeed` command itself runs on a single host, without a second import of DeepSpeed before it
    hosts = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", "--quiet", "--no_local_rank", "--node_rank", "0"]
    command += ["--world_info", hosts, "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command += ["--module", "launch.train", *arguments]
    launcher: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        if launcher is not None and launcher.poll() is None:
            os.killpg(launcher.pid, number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        launcher = subprocess.Popen(
            command, env=os.environ | environment, start_new_session=True, preexec_fn=end_with_parent
        )
        code = launcher.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def end_with_parent() -> None:
    """In a child, before it does anything: Linux sends it SIGTERM when its parent dies, even of SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A TCP port of this machine that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
