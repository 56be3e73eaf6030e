"""What this machine computes on, told without importing torch."""

from __future__ import annotations

import os
import subprocess
from typing import Literal

Device = Literal["cpu", "cuda"]


def gpu_count() -> int:
    """GPUs that ranks may use: none where DS_ACCELERATOR=cpu, else what CUDA_VISIBLE_DEVICES or the driver says."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
