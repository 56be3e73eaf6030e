"""One file per rank in `run_dir/.ranks`, from which the others learn about a rank that does not answer.

The first line names its host and process, and what ended it if known; the start time of the process distinguishes it
from a later one with the same number. Stacks follow if its interpreter was stuck: then no Python code of the rank runs,
including its watchdog, but faulthandler's thread does, which needs no interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
from pathlib import Path

import psutil

from megalite.checkpoint.safe_files import make_folder, open_new, read_small_file
from megalite.resilience.hang_report import NoResponse
from megalite.resilience.heartbeat import FOLDER
from megalite.resilience.rank_state import Number, StrictModel, Word

LONGEST_BYTES = 1 << 24  # stacks of many threads
DEAD = "is dead"
CLOCK_S = 2.0  # accuracy of a process's start time if the clock is set meanwhile


class _FirstLine(StrictModel):
    host: Word
    process: Number
    born: float  # in seconds after boot, which setting a clock does not change
    ended: Word  # an error; empty: unknown


class RankFile:
    """This rank's file, from the start of training to its end. Raises OSError if it cannot be created."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        path = _path(run_dir, rank)
        run_dir.mkdir(parents=True, exist_ok=True)
        make_folder(path.parent, private=True)
        path.unlink(missing_ok=True)  # one of an earlier launch, whose process may still have it open
        self._file = os.fdopen(open_new(path, private=True, append=True), "ab")
        self._write_first_line(ended="")

    def arm(self, seconds: float) -> None:
        """Writes the stacks of all threads unless a method is called again within `seconds`."""
        faulthandler.dump_traceback_later(seconds, file=self._file.fileno())

    def disarm(self) -> None:
        """Cancels `arm`. Like `arm` it does not touch the storage."""
        faulthandler.cancel_dump_traceback_later()

    def clear(self) -> None:
        """Removes the stacks again, after the process as a whole had been stopped."""
        os.ftruncate(self._file.fileno(), self._length)

    def leave(self, error: str) -> None:
        """Records the error that ends this rank, for ranks that go on."""
        self.disarm()
        self._write_first_line(ended=error)

    def remove(self) -> None:
        """Removes the file: no other rank will need it."""
        self.disarm()
        forget(self._run_dir, self._rank)

    def close(self) -> None:
        """Closes the file; call it last, after `remove` or `leave`."""
        self.disarm()
        self._file.close()

    def _write_first_line(self, ended: str) -> None:
        os.ftruncate(self._file.fileno(), 0)
        process = os.getpid()
        born = psutil.Process(process).create_time() - psutil.boot_time()
        line = _FirstLine(host=socket.gethostname(), process=process, born=born, ended=ended)
        self._length = self._file.write(f"{line.model_dump_json()}\n".encode())
        self._file.flush()


def look_for(run_dir: Path, rank: int) -> tuple[NoResponse, bytes]:
    """Returns what this host knows about a rank that does not answer, and its stacks if it left any."""
    try:
        first, _, stacks = read_small_file(_path(run_dir, rank), LONGEST_BYTES, trusted=True).partition(b"\n")
        found = _FirstLine.model_validate_json(first)
    except (OSError, ValueError):
        return NoResponse(), b""
    if found.ended:
        return NoResponse(found.host, f"it ended with {found.ended}", is_dead=True), b""
    condition = _condition(found, stacks) if found.host == socket.gethostname() else ""
    return NoResponse(found.host, condition, is_dead=condition.endswith(DEAD)), stacks


def recorded_errors(run_dir: Path, since: float) -> dict[int, str]:
    """Returns the errors that ranks have left since a time in unix seconds, by rank; whoever may write into the run's
    folder can plant one."""
    found = {}
    for path in sorted((run_dir / FOLDER).glob("rank_[0-9]*.txt")):
        with contextlib.suppress(OSError, ValueError):
            if path.lstat().st_mtime >= since:
                first = _FirstLine.model_validate_json(read_small_file(path, LONGEST_BYTES).partition(b"\n")[0])
                if first.ended:
                    found[int(path.stem.removeprefix("rank_"))] = first.ended
    return found


def forget(run_dir: Path, rank: int) -> None:
    """Removes the file of a rank, also of one that could not do so itself, once the others have read it."""
    path = _path(run_dir, rank)
    with contextlib.suppress(OSError):  # other ranks are still there
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _condition(line: _FirstLine, stacks: bytes) -> str:
    process = line.process
    try:
        found = psutil.Process(process)
        born = found.create_time() - psutil.boot_time()
        status = found.status() if abs(born - line.born) < CLOCK_S else psutil.STATUS_DEAD
    except psutil.Error:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        return f"its process {process} {DEAD}"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process {process} is stopped, by a signal or a debugger"
    if stacks:
        return f"its process {process} is alive, but stuck in code that keeps Python's interpreter to itself"
    return f"its process {process} is alive, but its watchdog is not"


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"rank_{rank:04d}.txt"
