"""What the kernel says about processes, by their ids as this machine counts, and waiting until it says otherwise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_S = 20.0  # for what takes milliseconds, on a machine that is busy


def lives(pid: int) -> bool:
    """Whether a process is there that is more than an exit code."""
    return state(pid) not in "ZX"


def state(pid: int) -> str:
    """The kernel's letter, such as T where it is stopped; X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def children(pid: int) -> list[int]:
    """Of its first thread; dead ones that it has not heard of among them."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def pid_namespace(pid: int) -> str:
    """Which processes it sees; empty where it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def members(namespace: str) -> list[int]:
    """The processes of a pid namespace that live."""
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in everyone if pid_namespace(pid) == namespace and lives(pid)]


def environment(pid: int) -> dict[str, str]:
    """As it was when its program began; empty where it is gone."""
    return {name: value for name, _, value in (entry.partition("=") for entry in _words(pid, "environ"))}


def listening(pid: int) -> set[str]:
    """Addresses at which a process and all that it has started wait for connections."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                connections = process.net_connections("tcp")
                found |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def command_line(pid: int) -> str:
    """Program and arguments."""
    return " ".join(_words(pid, "cmdline"))


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Fails where it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true in {timeout_s:g} s"
        time.sleep(0.002)


def _words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
