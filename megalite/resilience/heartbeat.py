"""Signs of life: each rank writes a number that grows into `run_dir/.ranks`; whoever waits for the ranks reads them.

A rank that is stopped, whose host has no power, or that is cut off cannot tell it; its number stands still. Only
changes of the number count, judged by the reader's clock: the hosts' clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = ".ranks"
READER = "reader.json"
BEAT_S = 2.0
WRITES_PER_S = 200  # by all ranks together, on storage that they share
LONGEST_BEAT_S = 10.0
LENGTH = 256  # bytes; all lines are equally long, so that no reader finds the end of an older one
LEAVE_S = 5.0  # for the thread to remove the file; a dead storage may keep it


@dataclass(frozen=True)
class Beat:
    """What a rank says."""

    attempt: str  # which start of the run it belongs to
    rank: int
    host: str
    process: int
    count: int  # grows while it lives
    step: int  # that it is in, from 1; 0: it starts

    def __str__(self) -> str:
        where = f"in step {self.step}" if self.step else "starting"
        return f"rank {self.rank} on {self.host} (process {self.process}, {where})"


class Heartbeat:
    """A thread that writes this rank's file. Whatever the storage does to it, it ends nothing and holds nobody up."""

    def __init__(self, run_dir: Path, rank: int, world_size: int, attempt: str) -> None:
        self.step: Callable[[], int] = lambda: 0  # called in the thread
        self.failures = 0  # to write
        self._rank, self._world_size = rank, world_size
        self._path = _path(run_dir, rank)
        self._attempt, self._count = attempt, 0
        self._host = socket.gethostname()
        self.every_s = min(LONGEST_BEAT_S, max(BEAT_S, world_size / WRITES_PER_S))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """This rank leaves as it should; without, its file is left for others to find that it does not beat."""
        self._is_over.set()
        self._thread.join(LEAVE_S)

    def _beat(self) -> None:
        if self._rank == 0:
            self._clear()
        while not self._is_over.is_set():
            self._count += 1
            try:
                self._write()
            except FileNotFoundError:
                pass  # rank 0 makes the run's folder a moment after the start
            except Exception:  # a rank must not fall silent for what may pass
                self.failures += 1
            self._is_over.wait(self.every_s)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _write(self) -> None:
        """In place, and closed each time: only then do other hosts of a network file system see it."""
        beat = Beat(self._attempt, self._rank, self._host, os.getpid(), self._count, self.step())
        write_line(self._path, json.dumps(asdict(beat)))

    def _clear(self) -> None:
        """Files of ranks that there are no more, on a smaller layout."""
        with contextlib.suppress(OSError, ValueError):
            for path in self._path.parent.glob("beat_*.json"):
                if int(path.stem.removeprefix("beat_")) >= self._world_size:
                    path.unlink()


def read_beats(run_dir: Path, attempt: str) -> dict[int, Beat]:
    """By rank, those that can be read at the moment."""
    found = {}
    for path in (run_dir / FOLDER).glob("beat_*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            beat = Beat(**json.loads(path.read_bytes()))
            if beat.attempt == attempt:
                found[beat.rank] = beat
    return found


class Silence:
    """Which ranks of an attempt were heard and are not heard any more. To be asked again and again, by one thread.

    Its clock stands still while it is not asked, as when this process was stopped together with the ranks, and while
    it cannot write to the storage itself, for then nobody can.
    """

    def __init__(
        self, run_dir: Path, attempt: str, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir, self._attempt, self._limit_s, self._clock = run_dir, attempt, limit_s, clock
        self._longest_pause_s = limit_s / 10  # between two questions; what is more was no time to listen
        self._asked_at, self._listened_s = time.monotonic(), 0.0
        self._heard: dict[int, tuple[tuple[int, int], float]] = {}  # rank: (process, count), when it became this

    def silent(self) -> list[Beat]:
        """The last words of ranks that have not been heard for the limit."""
        try:
            write_line(self._run_dir / FOLDER / READER, json.dumps({"attempt": self._attempt}))
            beats = read_beats(self._run_dir, self._attempt)
        except OSError:
            self._asked_at = time.monotonic()
            return []
        now = time.monotonic()
        self._listened_s += min(now - self._asked_at, self._longest_pause_s)
        self._asked_at = now
        self._heard = {rank: self._hear(beat) for rank, beat in beats.items()}
        return [beat for rank, beat in beats.items() if self._listened_s - self._heard[rank][1] > self._limit_s]

    def close(self) -> None:
        """Leaves no file behind."""
        with contextlib.suppress(OSError):
            (self._run_dir / FOLDER / READER).unlink(missing_ok=True)
            (self._run_dir / FOLDER).rmdir()

    def _hear(self, beat: Beat) -> tuple[tuple[int, int], float]:
        sign = (beat.process, beat.count)
        known = self._heard.get(beat.rank)
        return known if known is not None and known[0] == sign else (sign, self._listened_s)


def write_line(path: Path, text: str) -> None:
    """`text` in place, at once. Its folder is made, but not the run's, which may be a mistake."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another rank made it
            path.parent.mkdir()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, f"{text:<{LENGTH - 1}}\n".encode(), 0)
    finally:
        os.close(descriptor)


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"beat_{rank:04d}.json"
