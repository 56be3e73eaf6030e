"""The part `environment`: what this machine is, and what its accelerator reaches on plain products and copies.

Torch and the standard library alone. `python -m benchmarks.gpu_day.machine DEVICE` prints the facts as JSON; the entry
asks so in a process of its own, because whoever touches a GPU holds some of its memory.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_day.context import Context

NO_GPU = 3  # exit code
PACKAGES = ["torch", "triton", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "pydantic"]
PRODUCT_SIZES = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}  # many times the largest cache
REPETITIONS = {"cuda": 20, "cpu": 3}


def facts(device: str) -> dict[str, Any]:
    """Describes this machine. Raises LookupError if torch sees no such device."""
    import torch

    found: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if device == "cpu":
        return found | {"accelerator": f"CPU {_cpu_model()}", "count": 1}
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        raise LookupError(f"torch {torch.__version__} sees no GPU")
    gpu = torch.cuda.get_device_properties(0)
    return found | {
        "accelerator": torch.cuda.get_device_name(0),
        "count": torch.cuda.device_count(),
        "accelerator_memory_gib": round(gpu.total_memory / 2**30, 1),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "multiprocessors": gpu.multi_processor_count,
    }


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def run(context: Context) -> None:
    """The part."""
    context.item("machine", lambda: facts(context.device) | {"packages": _packages(), "driver": _driver()})
    context.item("products and copies", lambda: ceilings(context.device))


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "no nvidia-smi"
    return done.stdout.strip() or done.stderr.strip()


def ceilings(device: str) -> dict[str, Any]:
    """TFLOP/s of large square products on random numbers, and GB/s of a copy: no training goes beyond them."""
    import torch

    size, repetitions = PRODUCT_SIZES[device], REPETITIONS[device]
    measured: dict[str, Any] = {"product_size": size, "repetitions": repetitions, "product_tflops": {}}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        if device == "cpu" and name == "fp16":
            continue
        # on zeros a GPU draws less power and is faster than it will be in a training
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = _seconds(lambda a=left, b=right: a @ b, device, repetitions)  # type: ignore[misc]
        measured["product_tflops"][name] = round(2 * size**3 / seconds / 1e12, 3)
        print(f"{name} product of {size}: {measured['product_tflops'][name]:.4g} TFLOP/s", flush=True)
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device, repetitions)
    measured["copy_gb_per_s"] = round(2 * COPY_BYTES[device] / seconds / 1e9, 1)  # read and written
    print(f"copy: {measured['copy_gb_per_s']:.0f} GB/s, read and written", flush=True)
    return measured


def _seconds(work: Callable[[], object], device: str, repetitions: int) -> float:
    import torch

    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        work()
    wait()
    started = time.perf_counter()
    for _ in range(repetitions):
        work()
    wait()
    return (time.perf_counter() - started) / repetitions


def main() -> int:
    """Prints the facts; exit code 3 where there is no such device."""
    try:
        print(json.dumps(facts(sys.argv[1])))
    except LookupError as error:
        print(error, file=sys.stderr)
        return NO_GPU
    return 0


if __name__ == "__main__":
    sys.exit(main())
