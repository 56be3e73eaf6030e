"""Runs the tests of this folder with the stand-in loaded: python -m tests.device [OPTIONS OF PYTEST]."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from launch.runtime.local_ranks import MALLOC_TUNABLES
from tests.device.build import FOLDER, build

library = build()
with tempfile.TemporaryDirectory(prefix="stand_in_") as meeting_place:
    environment = os.environ | {
        "LD_PRELOAD": str(library / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(library),
        "TRITON_LIBCUDA_PATH": str(library),
        "STAND_IN_FOLDER": meeting_place,
        "STAND_IN_DEVICES": "8",
        "DS_ACCELERATOR": "cuda",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # ranks are forked from a process that has counted devices
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",  # which are made with the driver
        "GLIBC_TUNABLES": MALLOC_TUNABLES,  # as of a run: memory that is freed stays with the process
        "XDG_CACHE_HOME": str(FOLDER / "cache"),  # compiled blocks are found again
    }
    words = sys.argv[1:] or ["-n", "2", "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", *words]
    if not any(word.startswith("tests/") for word in words):
        command.append(str(Path(__file__).parent))
    child = subprocess.Popen(command, env=environment, start_new_session=True)  # a terminal would interrupt it twice
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
