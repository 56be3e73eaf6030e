"""Builds the stand-in as one library, `libcuda.so.1`, which is loaded before those of torch's CUDA build.

The sources in `stand_in/` define what torch and Triton call in a training step. All other functions that they ask for
are made here: those of cuBLAS and libraries of its kind do nothing, as kernels do, and products of matrices count as
launches; CUPTI lets nobody profile, as in many containers; any other ends the process with its name, so that nothing is
taken for done that is not.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent / "stand_in"
SITE = Path(sysconfig.get_path("purelib"))
FOLDER = Path(__file__).parents[2] / "build" / "stand_in"
LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "torch", "torch_cpu", "torch_nvshmem")
OF_CUDA = re.compile(r"(__cuda|cuda|cublas|cusparse|cusolver|curand|cufft|cudnn|nccl|cupti|nvtx|nvrtc)[A-Z_a-z]\w*")
QUIET = re.compile(r"(cublas|cusparse|cusolver|curand|cufft|nvtx)")
DENIED = 35  # CUPTI_ERROR_INSUFFICIENT_PRIVILEGES
PRODUCT = re.compile(r"cublas([SDCZ]?gemm|Gemm|[SDCZ]gemv|DotEx|[SDCZ]dot)")
OF_DRIVER = re.compile(r"\b(cu[A-Z][a-z]\w+)\(")
OWN = re.compile(r"^EXPORTED (?:ASKED\()?[\w *]+?\**(\w+)\(", re.MULTILINE)
FLAGS = ("-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden")
INCLUDES = ("nvidia/cu13/include", "nvidia/nccl/include", "triton/backends/nvidia/include")


def build() -> Path:
    """Returns the folder with the library, made anew where a source or torch has changed."""
    sources = sorted(SOURCES.glob("*.[ch]*"))
    version = (SITE / "torch" / "version.py").read_bytes()
    digest = hashlib.sha256(b"".join([version, *(source.read_bytes() for source in [Path(__file__), *sources])]))
    folder = FOLDER / digest.hexdigest()[:16]
    if not (folder / "libcuda.so").is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
        rest = folder / "rest.c"
        rest.write_text(_rest("\n".join(source.read_text() for source in sources)))
        _compile([source for source in sources if source.suffix == ".c"] + [rest], folder / "libcuda.so.1")
        _compile_allocator(folder / "allocator.so")
        for name in ("libnvidia-ml.so.1", "libcuda.so"):
            (folder / name).symlink_to("libcuda.so.1")
    return folder


def _rest(sources: str) -> str:
    """The functions that torch's libraries and Triton ask for and the sources do not have."""
    own = set(OWN.findall(sources))
    lines = ['#include "device.h"', "void enqueue_product(void **handle);"]
    for name in sorted(_asked_for() - own):
        if PRODUCT.match(name):
            body = "(void **handle) { enqueue_product(handle); return 0; }"
        elif QUIET.match(name):
            body = "(void) { return 0; }"
        elif name.startswith("cupti"):
            body = f"(void) {{ return {DENIED}; }}"
        else:
            body = f'(void) {{ give_up("{name} is called, which is not stood in for"); }}'
        lines.append(f"EXPORTED int {name}{body}")
    return "\n".join(lines) + "\n"


def _asked_for() -> set[str]:
    libraries = [SITE / "torch" / "lib" / f"lib{name}.so" for name in LIBRARIES]
    listing = ["nm", "--dynamic", "--undefined-only", *map(str, filter(Path.exists, libraries))]
    symbols = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    names = (line.split()[-1].partition("@")[0] for line in symbols.splitlines() if " U " in line)
    of_triton = (SITE / "triton" / "backends" / "nvidia" / "driver.c").read_text()
    return {name for name in names if OF_CUDA.fullmatch(name)} | {*OF_DRIVER.findall(of_triton)}


def _compile(sources: list[Path], library: Path) -> None:
    command = ["gcc", "-std=gnu11", *FLAGS, "-Wall", "-Werror", f"-Wl,-soname,{library.name}", "-o", str(library)]
    command += [f"-I{SOURCES}", *(f"-I{SITE / place}" for place in INCLUDES), *map(str, sources), "-lpthread", "-ldl"]
    subprocess.run(command, check=True)


def _compile_allocator(library: Path) -> None:
    """What follows torch's allocator is C++ and needs its headers; it is loaded once torch is."""
    includes = [f"-I{SITE / place}" for place in ("torch/include", *INCLUDES)]
    command = ["g++", "-std=c++20", *FLAGS, *includes, "-o", str(library), str(SOURCES / "allocator.cpp")]
    subprocess.run([*command, f"-L{SITE / 'torch' / 'lib'}", "-lc10_cuda", "-lc10"], check=True)
