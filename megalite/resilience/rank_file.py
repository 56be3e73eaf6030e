"""Where a rank can be found by the others when it does not answer: one file per rank in `run_dir/.ranks`.

The first line names its host and process, and what ended it if it knows; when the process began tells it from a later
one with its number. Stacks follow if its interpreter was stuck:
then no Python code of the rank runs, its watchdog neither, but faulthandler's thread does, which needs no interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
from pathlib import Path

import psutil

from megalite.resilience.heartbeat import FOLDER
from megalite.resilience.who_waits import Silence

CLOCK_S = 2.0  # how exactly the kernel tells when a process began, if the clock is set meanwhile


class RankFile:
    """This rank's file, from the start of training to its end. Raises OSError where it cannot be made."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = _path(run_dir, rank)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)  # of an earlier launch, whose process may still have it open
        self._file = self._path.open("ab")
        self._write_first_line(ended="")

    def arm(self, seconds: float) -> None:
        """Adds the stacks of all threads if neither this nor another method is called within `seconds`."""
        faulthandler.dump_traceback_later(seconds, file=self._file.fileno())

    def disarm(self) -> None:
        """No stacks will be added. Like `arm` it does not touch the storage."""
        faulthandler.cancel_dump_traceback_later()

    def clear(self) -> None:
        """Takes stacks out again: the process had been stopped as a whole."""
        os.ftruncate(self._file.fileno(), self._length)

    def leave(self, error: str) -> None:
        """Leaves a last word for the others: this rank ends, and they may not."""
        self.disarm()
        self._write_first_line(ended=error)

    def remove(self) -> None:
        """Nobody will have to look for this rank any more."""
        self.disarm()
        _remove(self._path)

    def close(self) -> None:
        """To be called last, after `remove` or `leave`."""
        self.disarm()
        self._file.close()

    def _write_first_line(self, ended: str) -> None:
        os.ftruncate(self._file.fileno(), 0)
        process = os.getpid()
        facts = {"host": socket.gethostname(), "process": process, "born": _born(psutil.Process(process))}
        line = json.dumps({**facts, "ended": ended})
        self._length = self._file.write(f"{line}\n".encode())
        self._file.flush()


def look_for(run_dir: Path, rank: int) -> tuple[Silence, bytes]:
    """What can be found out here about a rank that does not answer, and its stacks where it left any."""
    try:
        first, _, stacks = _path(run_dir, rank).read_bytes().partition(b"\n")
        found = json.loads(first)
        host, process, ended = str(found["host"]), int(found["process"]), str(found["ended"])
        born = float(found["born"])
    except (OSError, ValueError, KeyError, TypeError):
        return Silence(), b""
    if ended:
        return Silence(host, f"it ended with {ended}"), b""
    return Silence(host, _condition(process, born, stacks) if host == socket.gethostname() else ""), stacks


def forget(run_dir: Path, rank: int) -> None:
    """Removes the file of a rank that did not remove it itself, once everybody knows."""
    _remove(_path(run_dir, rank))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # other ranks are still there
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _condition(process: int, born: float, stacks: bytes) -> str:
    try:
        found = psutil.Process(process)
        status = found.status() if abs(_born(found) - born) < CLOCK_S else psutil.STATUS_DEAD
    except psutil.Error:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return f"its process {process} is dead"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process {process} is stopped, by a signal or a debugger"
    if stacks:
        return f"its process {process} is alive, but stuck in code that keeps Python's interpreter to itself"
    return f"its process {process} is alive, but its watchdog is not"


def _born(process: psutil.Process) -> float:
    """Seconds after the host started, which no setting of a clock changes."""
    return float(process.create_time() - psutil.boot_time())


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank_{rank:04d}.txt"
