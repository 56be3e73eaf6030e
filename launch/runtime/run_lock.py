"""The lock of a run's folder: a file that rank 0 keeps locked, and that says which process that is. Linux only.

The kernel, or the server of a network file system, gives the lock back when its process ends, however it ends. A file
system without such locks (Lustre may be mounted so) or with locks of each host alone cannot tell; the reader then has
the other traces of the run (launch/inspection).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import psutil

from megalite.checkpoint.safe_files import SAFELY, open_to_write, read_small_file

LOCK = ".lock"
LONGEST_BYTES = 4096
LARGEST_PROCESS_ID = 1 << 22  # of Linux, linux/threads.h
LOOKED_AT_S = 1.0  # `is_locked` holds the lock for a moment, longer on a busy host, which must not make a start fail
RETRY_S = 0.02


@dataclass(frozen=True)
class LockHolder:
    """The process that took the lock last."""

    host: str
    process: int
    time: float  # when it took it, in unix seconds

    def is_alive(self) -> bool | None:
        """Returns whether the process exists; None if it is of another host."""
        if self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.process)
            return process.create_time() <= self.time + 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def take_lock(folder: Path, patience_s: float = 0.0) -> IO[str]:
    """Locks a run's folder until the returned file is closed, and writes down who holds it.

    Raises BlockingIOError if another process keeps the lock for longer than `patience_s`, UnsafeFile where a stranger
    has put something in its place, and another OSError if the file cannot be written.
    """
    lock = os.fdopen(open_to_write(folder / LOCK), "r+")  # what it says stays until the lock is ours
    try:
        lock_file(lock, patience_s)
    except OSError:
        lock.close()
        raise
    holder = LockHolder(socket.gethostname(), os.getpid(), time.time())
    with contextlib.suppress(OSError):  # a full disk; the run needs only the lock
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{json.dumps(asdict(holder))}\n".encode())
        os.fsync(lock.fileno())  # other hosts compare it (megalite/checkpoint/fence.py)
    return lock


def lock_file(lock: IO[str], patience_s: float = 0.0) -> None:
    """Locks an open lock file; outlasts those who only look at it. Raises BlockingIOError as `take_lock` does."""
    deadline = time.monotonic() + max(patience_s, LOOKED_AT_S)
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def is_locked(folder: Path) -> bool | None:
    """Returns whether a process holds the lock of a run's folder; None if this file system does not tell."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | SAFELY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def lock_holder(folder: Path) -> LockHolder | None:
    """Returns the process that took the lock last; None if none did, or if an older version of megalite did."""
    try:
        found = LockHolder(**json.loads(read_small_file(folder / LOCK, LONGEST_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_sound = isinstance(found.host, str) and type(found.process) is int and isinstance(found.time, float)
    return found if is_sound and 0 < found.process <= LARGEST_PROCESS_ID else None
