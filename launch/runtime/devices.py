"""Counts the devices of this machine, and the memory of its GPUs, without importing torch."""

from __future__ import annotations

import os
import subprocess
from typing import Literal

from launch.errors import LaunchError
from launch.runtime.host_probe import sizes_of_gpus, start_sizing_gpus

Device = Literal["cpu", "cuda"]


def gpu_count() -> int:
    """Returns how many GPUs ranks may use: those in CUDA_VISIBLE_DEVICES if it is set, none with DS_ACCELERATOR=cpu.

    Raises LaunchError if DS_ACCELERATOR names something else than the CPU or CUDA.
    """
    accelerator = os.environ.get("DS_ACCELERATOR")
    if accelerator not in (None, "cpu", "cuda"):
        raise LaunchError(f"DS_ACCELERATOR is {accelerator!r} in the environment: set it to cpu or cuda, or unset it")
    if accelerator == "cpu":
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):  # not there, or in a folder of PATH that may not be read
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


def gpu_memory_bytes() -> int | None:
    """Returns the memory of the largest GPU of this machine; None if the driver does not tell it."""
    return max((size for size in sizes_of_gpus(start_sizing_gpus()) if size is not None), default=None)
