"""Where a rank can be found by the others when it does not answer: one file per rank in `run_dir/.ranks`.

The first line names its host and process, and what ended it if it knows. Stacks follow if its interpreter was stuck:
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

from megalite.resilience.who_waits import Silence

FOLDER = ".ranks"


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
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def clear(self) -> None:
        """Takes stacks out again: the process had been stopped as a whole."""
        faulthandler.cancel_dump_traceback_later()
        os.ftruncate(self._file.fileno(), self._length)

    def leave(self, error: str) -> None:
        """Leaves a last word for the others: this rank ends, and they may not."""
        self.clear()
        self._write_first_line(ended=error)

    def remove(self) -> None:
        """Nobody will have to look for this rank any more."""
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # other ranks are still there
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def close(self) -> None:
        """To be called last, after `remove` or `leave`."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()

    def _write_first_line(self, ended: str) -> None:
        os.ftruncate(self._file.fileno(), 0)
        line = json.dumps({"host": socket.gethostname(), "process": os.getpid(), "ended": ended})
        self._length = self._file.write(f"{line}\n".encode())
        self._file.flush()


def look_for(run_dir: Path, rank: int) -> tuple[Silence, bytes]:
    """What can be found out here about a rank that does not answer, and its stacks where it left any."""
    try:
        first, _, stacks = _path(run_dir, rank).read_bytes().partition(b"\n")
        found = json.loads(first)
        host, process, ended = str(found["host"]), int(found["process"]), str(found["ended"])
    except (OSError, ValueError, KeyError, TypeError):
        return Silence(), b""
    if ended:
        return Silence(host, f"it ended with {ended}"), b""
    return Silence(host, _condition(process, stacks) if host == socket.gethostname() else ""), stacks


def _condition(process: int, stacks: bytes) -> str:
    try:
        status = psutil.Process(process).status()
    except psutil.Error:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return f"its process {process} is dead"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process {process} is stopped, by a signal or a debugger"
    if stacks:
        return f"its process {process} is alive, but stuck in code that keeps Python's interpreter to itself"
    return f"its process {process} is alive, but its watchdog is not"


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank_{rank:04d}.txt"
