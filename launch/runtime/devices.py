"""Counts the devices of this machine, and their memory, without importing torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import psutil

Device = Literal["cpu", "cuda"]


def gpu_count() -> int:
    """Returns how many GPUs ranks may use: those in CUDA_VISIBLE_DEVICES if it is set, none with DS_ACCELERATOR=cpu."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    gpus = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    named = [device.strip() for device in visible.split(",")]
    exist = [int(name) < gpus if name.isdecimal() else f"UUID: {name}" in listing.stdout for name in named if name]
    return exist.index(False) if False in exist else len(exist)  # CUDA stops at the first that does not exist


def cpu_count() -> int:
    """Returns the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def host_memory_bytes() -> int:
    """Returns the memory that processes of this host may use together: all of it, or less where a cgroup limits it.

    Swap space does not count: a run that needs it makes no progress.
    """
    return min(psutil.virtual_memory().total, *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))


def gpu_memory_bytes() -> int | None:
    """Returns the memory of the largest GPU of this machine; None if the driver does not tell it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) << 20 for line in listing.splitlines() if line.strip().isdecimal()]
    return max(sizes, default=None)


def _cgroup_limits(memberships: Path, root: Path) -> Iterator[int]:
    """Yields the memory limits of this process's cgroup and those above it, of versions 1 and 2, in bytes."""
    with contextlib.suppress(OSError):
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
            own = PurePosixPath(path.lstrip("/"))
            for folder in dict.fromkeys((own, *own.parents)):
                # in a container the path may be one that is seen from outside alone
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    yield int((top / folder / name).read_text())
