"""Finds the GPUs of a host: by nvidia-smi or, where it is absent or does not answer, by the library of their driver.

Containers may have the driver without nvidia-smi (NVIDIA_DRIVER_CAPABILITIES=compute), and AMD's GPUs never have it.
The source is sent through ssh as that of host_probe.py is: standard library only, Python 3.8 or newer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GPUS_S = 20.0  # the driver takes seconds to initialise many GPUs
DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd")  # of NVIDIA's driver, and of AMD's
CUDA, HIP = "libcuda.so.1", "libamdhip64.so"
FUNCTIONS = {
    CUDA: ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem_v2"),
    HIP: ("hipInit", "hipGetDeviceCount", "hipDeviceGet", "hipDeviceGetName", "hipDeviceTotalMem"),
}
# in a process of its own: a driver may hang or crash, and what it holds ends with the process
ASKING = """
import ctypes, json, sys

def reason(driver, code):
    text = ctypes.c_char_p()
    if hasattr(driver, "cuGetErrorString"):
        driver.cuGetErrorString(code, ctypes.byref(text))
    elif hasattr(driver, "hipGetErrorString"):
        driver.hipGetErrorString.restype = ctypes.c_char_p
        text.value = driver.hipGetErrorString(code)
    return "%s (error %d)" % ((text.value or b"it fails").decode(errors="replace"), code)

def ask(driver, init, get_count, get, get_name, get_size):
    count, gpus = ctypes.c_int(), []
    code = getattr(driver, init)(0) or getattr(driver, get_count)(ctypes.byref(count))
    for number in range(0 if code else count.value):
        device, name, size = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        code = getattr(driver, get)(ctypes.byref(device), number)
        code = code or getattr(driver, get_name)(name, 256, device)
        code = code or getattr(driver, get_size)(ctypes.byref(size), device)
        if code:
            break
        gpus.append([name.value.decode(errors="replace") or "GPU", size.value])
    return {"gpus": gpus, "problem": reason(driver, code) if code else None}

for library, path, functions in json.loads(sys.argv[1]):
    try:
        driver = ctypes.CDLL(path)
    except OSError:
        continue
    print(json.dumps({"library": library, **ask(driver, *functions)}), flush=True)
    break
"""


def gpu_facts() -> dict[str, Any]:
    """Returns names of the GPUs, their bytes of memory as far as the driver tells them, and what is wrong with them."""
    listing, sizing = start_listing_gpus(), start_sizing_gpus()
    output, problem = listed(listing)
    if names := names_in_listing(output):
        return {"gpus": names, "gpu_problem": problem, "gpu_memory_bytes": sizes_of_gpus(sizing)}
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    gpus, why = ask_driver(environment)
    if gpus:
        return {"gpus": [name for name, _ in gpus], "gpu_problem": None, "gpu_memory_bytes": [size for _, size in gpus]}
    has_some = listing is not None or has_device_files()
    return {"gpus": [], "gpu_problem": f"no GPU found: {problem}; {why}" if has_some else None, "gpu_memory_bytes": []}


def has_device_files() -> bool:
    """Returns whether a driver of GPUs has made its devices here."""
    return any(Path(file).exists() for file in DEVICE_FILES)


def start_listing_gpus() -> subprocess.Popen[str] | None:
    with contextlib.suppress(OSError):  # not there, or in a folder of PATH that may not be read
        return subprocess.Popen(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return None


def listed(listing: subprocess.Popen[str] | None) -> tuple[str, str | None]:
    """Returns what nvidia-smi prints about the GPUs, and what is wrong."""
    if listing is None:
        return "", "there is no nvidia-smi"
    try:
        output, _ = listing.communicate(timeout=GPUS_S)
    except subprocess.TimeoutExpired:
        listing.kill()
        return "", f"nvidia-smi does not answer within {GPUS_S:g} s"
    if not listing.returncode and names_in_listing(output):
        return output, None
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("GPU ")]
    return output, f"nvidia-smi: {lines[0].strip()}" if lines else "nvidia-smi fails"


def names_in_listing(output: str) -> list[str]:
    """Returns the names of the GPUs in what nvidia-smi prints."""
    return [line.partition(": ")[2].partition(" (UUID")[0] for line in output.splitlines() if line.startswith("GPU ")]


def start_sizing_gpus() -> subprocess.Popen[str] | None:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None


def sizes_of_gpus(sizing: subprocess.Popen[str] | None) -> list[int | None]:
    """Returns the bytes of memory of each GPU, None where the driver does not tell; empty if it does not answer."""
    if sizing is None:
        return []
    try:
        output, _ = sizing.communicate(timeout=GPUS_S)
    except subprocess.TimeoutExpired:
        sizing.kill()
        return []
    if sizing.returncode:
        return []
    return [int(line) << 20 if line.strip().isdecimal() else None for line in output.splitlines()]


def ask_driver(environment: Mapping[str, str]) -> tuple[list[tuple[str, int]], str | None]:
    """Asks CUDA's or HIP's library which GPUs a process with this environment sees, in such a process.

    Returns their names and bytes of memory, and why there are none.
    """
    torch = Path(sysconfig.get_path("purelib"), "torch", "lib", HIP)  # ROCm's wheels bring it along
    paths = ((CUDA, CUDA), (HIP, HIP), (HIP, str(torch)), (HIP, f"/opt/rocm/lib/{HIP}"))
    asked = json.dumps([(library, path, FUNCTIONS[library]) for library, path in paths])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ASKING, asked],
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GPUS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"their driver's library does not answer within {GPUS_S:g} s"
    except OSError as error:
        return [], f"their driver's library cannot be asked: {error.strerror}"
    if done.returncode:
        return [], f"their driver's library ends with {done.returncode} when it is asked"
    if not done.stdout.strip():
        return [], f"neither {CUDA} nor {HIP}, the libraries of their drivers, can be loaded"
    found = json.loads(done.stdout.splitlines()[-1])
    why = f"{found['library']}: {found['problem'] or 'it sees no GPU'}"
    return [(name, size) for name, size in found["gpus"]], None if found["gpus"] else why


GPU_ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {"gpu_facts": gpu_facts}
