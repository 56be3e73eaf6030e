"""DeepSpeed's Adam for the CPU, compiled once per machine, or the reason why it is not to be had.

DeepSpeed compiles it in the process that first uses it, in a folder with a lock: where that process is killed the lock
stays, and all later ones wait for it forever. Here a process of its own compiles in a new folder, within a time limit,
and what it has made is renamed into the cache: a build that is killed leaves nothing that another one waits for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast

import deepspeed
import psutil
import torch
import torch.distributed as dist

from megalite.config.user_folders import cache_folder
from megalite.distributed.agreement import from_all_ranks
from megalite.engine.deepspeed.internals import use_cpu_adam

BUILD_LIMIT = timedelta(minutes=5)  # 90 s on two cores
BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"

Value = TypeVar("Value")
log = logging.getLogger(__name__)


def why_no_cpu_adam(limit: timedelta = BUILD_LIMIT) -> str | None:
    """Makes `deepspeed.ops.adam.DeepSpeedCPUAdam` usable on all ranks; collective.

    One rank of each host compiles, unless the cache has a library for its CPU and versions, and the others wait.
    Returns None, or the first rank's reason why it is usable on none.
    """
    try:
        library, is_to_be_made = _on_all_ranks(_place_in_cache)
        host = socket.gethostname()
        compiles = from_all_ranks(host, str).index(host) == dist.get_rank() and is_to_be_made
        if any(from_all_ranks(compiles, bool)):
            if dist.get_rank() == 0:
                log.info(
                    "offload.optimizer cpu: compiling DeepSpeed's Adam for the CPU, once for this CPU and these "
                    f"versions, in some minutes, at most {limit.total_seconds():g} s"
                )
            _on_all_ranks(partial(compile_into, library, limit) if compiles else lambda: None)
        _on_all_ranks(lambda: use_cpu_adam(_loaded(library)))
    except _NotUsable as reason:
        return str(reason)
    return None


class _NotUsable(Exception):
    """The first rank's reason."""


def _on_all_ranks(attempt: Callable[[], Value]) -> Value:
    """Returns what the attempt returns; collective. Raises _NotUsable on all ranks where one of them fails for want of
    a compiler, a library or a place."""
    result, reason = None, None
    try:
        result = attempt()
    except (OSError, RuntimeError, ImportError) as error:
        text = str(error).encode(errors="backslashreplace").decode()  # a name of a file may be no text
        reason = text.splitlines()[0] if text else type(error).__name__
    if first := next(filter(None, from_all_ranks(reason, str | None)), None):
        raise _NotUsable(first)
    return cast(Value, result)


def _place_in_cache() -> tuple[Path, bool]:
    """Returns the place of the library, in a folder that is there, and whether it is still to be compiled."""
    library = cached_library()
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        found = library.stat()
    except FileNotFoundError:
        return library, True
    return library, found.st_uid == os.getuid() and bool(found.st_mode & 0o022)  # others' cannot be replaced


def cached_library() -> Path:
    """Returns the place of the library for this CPU and these versions; it need not exist."""
    machine = [deepspeed.__version__, torch.__version__, sys.version, platform.machine(), _cpu_features()]
    key = hashlib.sha256("\n".join(machine).encode()).hexdigest()[:16]
    return cache_folder() / f"cpu_adam_{key}" / "cpu_adam.so"


def _cpu_features() -> str:
    """Returns the line with the CPU's instruction sets, for which the compiler optimizes; empty beside Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compile_into(library: Path, limit: timedelta) -> None:
    """Compiles the library. Raises OSError without a place for it, RuntimeError where it does not compile in time."""
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix="building_", dir=library.parent) as folder:
        environment = os.environ | {"TORCH_EXTENSIONS_DIR": folder}
        with subprocess.Popen(
            [sys.executable, "-P", "-c", BUILD],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
        ) as build:
            try:
                _, errors = build.communicate(timeout=limit.total_seconds())
            except BaseException as error:
                _kill_with_descendants(build.pid)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise RuntimeError(f"it did not compile in {limit.total_seconds():g} s") from None
                raise
        if build.returncode:
            lines = [line for line in errors.splitlines() if "error" in line.lower()] or ["no reason given"]
            raise RuntimeError(f"it does not compile: {lines[0].strip()}")
        compiled = next(Path(folder).rglob("*.so"), None)
        if compiled is None:
            raise RuntimeError("its compilation ended without an error and without a library")
        compiled.chmod(0o700)  # a linker lets all write whom the umask does not forbid it
        compiled.replace(library)


def _kill_with_descendants(process_id: int) -> None:
    """Kills a process and all that descend from it, in whatever group: ninja gives each compiler one of its own.

    Each is stopped before its children are listed, so that it can start no more.
    """
    stopped: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found = [psutil.Process(process_id)]
        while found:
            stopped.append(found.pop())
            with suppress(psutil.Error):
                stopped[-1].suspend()
                found += stopped[-1].children()
    for process in stopped:
        with suppress(psutil.Error):
            process.kill()


def _loaded(library: Path) -> ModuleType:
    found = library.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RuntimeError(f"{library} may be written to by other users")
    spec = importlib.util.spec_from_file_location("cpu_adam", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
