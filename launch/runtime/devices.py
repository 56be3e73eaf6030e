"""Counts the devices of this machine, and the memory of its GPUs, without importing torch."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from launch.errors import LaunchError
from launch.runtime.gpu_probe import (
    ask_driver,
    has_device_files,
    listed,
    names_in_listing,
    sizes_of_gpus,
    start_listing_gpus,
    start_sizing_gpus,
)
from launch.runtime.logs import get_logger

Device = Literal["cpu", "cuda"]

log = get_logger(__name__)
SILENCE_S = 8.0  # in which nvidia-smi usually answers
ASKED = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
CPUS, BUILDS = "CPUs", {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES by which users hide all GPUs


@dataclass(frozen=True)
class _Gpus:
    """The GPUs that ranks may use, and why there are none."""

    count: int
    names: tuple[str, ...] = ()  # of all that are there
    sizes: tuple[int, ...] = ()  # bytes of memory, where the driver was asked; nvidia-smi is asked for them separately
    why_none: str | None = None


def gpu_count() -> int:
    """Returns how many GPUs ranks may use: those in CUDA_VISIBLE_DEVICES. Raises LaunchError like `chosen_device`."""
    return 0 if chosen_device() == "cpu" else _gpus_here().count


def chosen_device() -> str | None:
    """Returns the DS_ACCELERATOR of the environment. Raises LaunchError if that is neither the CPU nor CUDA."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen not in (None, "cpu", "cuda"):
        raise LaunchError(f"DS_ACCELERATOR is {chosen!r} in the environment: set it to cpu or cuda, or unset it")
    return chosen


def gpu_names() -> tuple[str, ...]:
    """Returns the names of the GPUs of this machine by its driver."""
    return _gpus_here().names


def why_no_gpu() -> str | None:
    """Returns why ranks may use no GPU, where this machine looks as if it had some."""
    return _gpus_here().why_none


def cpu_count() -> int:
    """Returns the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_memory_bytes() -> int | None:
    """Returns the memory of the largest GPU of this machine; None if the driver does not tell it."""
    sizes = _gpus_here().sizes or sizes_of_gpus(start_sizing_gpus())
    return max((size for size in sizes if size is not None), default=None)


def _gpus_here() -> _Gpus:
    return _gpus_seen_with(*map(os.environ.get, ASKED))


@cache
def _gpus_seen_with(*environment: str | None) -> _Gpus:
    """Looks for GPUs, once for an environment, and says where there are none although it looks as if there were."""
    found = _look_for_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found.why_none is not None:
        log.warning(f"no GPU found, because {found.why_none}: the CPU computes (DS_ACCELERATOR=cpu if it is to)")
    return found


def _look_for_gpus(visible: str | None) -> _Gpus:
    if visible is not None and visible.strip() in HIDDEN:
        return _Gpus(0)
    listing = start_listing_gpus()
    if listing is not None:
        try:
            listing.wait(SILENCE_S)
        except subprocess.TimeoutExpired:
            log.warning(f"looking for GPUs: nvidia-smi has not answered for {SILENCE_S:g} s")
    output, problem = listed(listing)
    names, build = names_in_listing(output), torch_build()
    sizes: tuple[int, ...] = ()
    if names:
        count = len(names) if visible is None else _visible(visible, len(names), output)
    else:
        gpus, why = ask_driver(os.environ)  # which leaves out what is not visible
        if not gpus and (listing or has_device_files() or build not in (None, CPUS)):
            return _Gpus(0, why_none=f"{problem}, and {why}; torch is built for {build}")
        count, names, sizes = len(gpus), [name for name, _ in gpus], tuple(size for _, size in gpus)
    why_none = None
    if names and build == CPUS:
        count, why_none = 0, f"torch is built for {CPUS} alone, so that it cannot use {names[0]}"
    elif names and not count:
        why_none = f"CUDA_VISIBLE_DEVICES is {visible!r}, which begins with none of the {len(names)} that are there"
    return _Gpus(count, tuple(names), sizes, why_none)


def _visible(visible: str, gpus: int, output: str) -> int:
    """Returns how many of the GPUs a value of CUDA_VISIBLE_DEVICES names: CUDA stops at the first that is not there."""
    named = [device.strip() for device in visible.split(",")]
    exist = [int(name) < gpus if name.isdecimal() else f"UUID: {name}" in output for name in named if name]
    return exist.index(False) if False in exist else len(exist)


def torch_build() -> str | None:
    """Returns for what torch is built, such as CUDA 13.0 or CPUs, without importing it; None if that is not known."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else Path()
    if not file.is_file():
        return None
    built = re.search(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]([^'\"]+)", file.read_text(), re.MULTILINE)
    return f"{BUILDS[built[1]]} {built[2]}" if built else CPUS
