"""Heartbeats: each rank writes a growing number into `run_dir/.ranks`, which the supervisor of the ranks reads.

A rank that is stopped, cut off, or whose host has no power cannot report it; its number stands still. The reader only
looks for changes of the number by its own clock, so the hosts' clocks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.checkpoint.safe_files import UnsafeFile, make_folder, open_to_write, read_small_file
from megalite.monitor.observer import Nonfatal

log = logging.getLogger(__name__)

FOLDER = ".ranks"
READER = "reader.json"
BEAT_S = 2.0
WRITES_PER_S = 200  # of all ranks together, on shared storage
LONGEST_BEAT_S = 10.0
LENGTH = 256  # bytes; all lines are equally long, so that no reader sees the end of an older one
LONGEST = 4 * LENGTH  # a line with long names is longer
LARGEST = 1 << 31  # above every number of a rank, a process or a step, and what psutil takes
LEAVE_S = 5.0  # for the thread to remove the file; storage that hangs may block it


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank."""

    attempt: str  # the start of the run that it belongs to
    rank: int
    host: str
    process: int
    count: int  # grows while the rank lives
    step: int  # the current step, from 1; 0: starting

    @classmethod
    def parsed(cls, data: bytes) -> Beat:
        """Parses the line of a rank. Raises ValueError for anything that no rank writes."""
        try:
            found = cls(**json.loads(data))
        except (TypeError, RecursionError):  # whose messages hold words of the file
            raise ValueError("it is no JSON object with the facts of a rank") from None
        words, numbers = (found.attempt, found.host), (found.rank, found.process, found.count, found.step)
        if not all(isinstance(word, str) and word.isprintable() for word in words):
            raise ValueError("its attempt or host is no printable word")
        if not all(type(number) is int and 0 <= number < LARGEST for number in numbers) or found.process == 0:
            raise ValueError("its rank, process, count or step is no such number")
        return found

    def __str__(self) -> str:
        where = f"in step {self.step}" if self.step else "starting"
        return f"rank {self.rank} on {self.host} (process {self.process}, {where})"


class Heartbeat:
    """Writes this rank's file in a thread. Failures of the storage neither end the rank nor block it."""

    def __init__(self, run_dir: Path, rank: int, world_size: int, attempt: str) -> None:
        self.step: Callable[[], int] = lambda: 0  # called in the thread
        self._nonfatal = Nonfatal(log.warning)
        self._name = f"the heartbeat of rank {rank}, without which its supervisor ends it,"  # in warnings
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
        """Removes the file, when this rank leaves as it should; otherwise it stays behind and goes stale."""
        self._is_over.set()
        self._thread.join(LEAVE_S)
        if said := self._nonfatal.sentence():
            log.warning(said)

    def _beat(self) -> None:
        if self._rank == 0:
            self._clear()
        while not self._is_over.is_set():
            self._count, step = self._count + 1, 0
            with contextlib.suppress(Exception):  # a heartbeat without its step is one too
                step = self.step()
            # rank 0 creates the run's folder a moment after the start
            with self._nonfatal(self._name), contextlib.suppress(FileNotFoundError):
                self._write(step)
            self._is_over.wait(self.every_s)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _write(self, step: int) -> None:
        """Writes in place and closes the file each time: only then do other hosts of a network file system see it."""
        beat = Beat(self._attempt, self._rank, self._host, os.getpid(), self._count, step)
        write_line(self._path, json.dumps(asdict(beat)))

    def _clear(self) -> None:
        """Removes files of ranks that a smaller layout does not have."""
        with contextlib.suppress(OSError, ValueError):
            for path in self._path.parent.glob("beat_*.json"):
                if int(path.stem.removeprefix("beat_")) >= self._world_size:
                    path.unlink()


def read_beats(
    run_dir: Path, attempt: str, world_size: int | None = None, refused: dict[str, str] | None = None
) -> dict[int, Beat]:
    """Returns by rank the heartbeats of an attempt that can be read at the moment.

    Ignores what no rank of `world_size` ranks writes (None: any number); adds it to `refused`: file -> reason.
    """
    found = {}
    for path in (run_dir / FOLDER).glob("beat_*.json"):
        try:
            beat = Beat.parsed(read_small_file(path, LONGEST, trusted=True))
            if beat.attempt != attempt:  # of an earlier one, whose ranks were killed
                continue
            if path != _path(run_dir, beat.rank) or (world_size is not None and beat.rank >= world_size):
                raise ValueError(f"there is no rank {beat.rank} that writes this file")
            found[beat.rank] = beat
        except FileNotFoundError:
            continue  # its rank has left
        except (UnsafeFile, ValueError) as error:
            if refused is not None:
                refused[path.name] = str(error)
        except OSError:
            continue  # the storage may answer the next time
    return found


def beat_times(run_dir: Path) -> list[tuple[float, float]]:
    """Returns when each rank wrote its heartbeat last, in unix seconds, and the seconds since, whatever the attempt.

    Whoever may write into the run's folder can plant a time.

    By this host's clock and the file system's: for a reader that looks once. A supervisor has `StaleHeartbeats`.
    """
    found = []
    for path in (run_dir / FOLDER).glob("beat_*.json"):
        with contextlib.suppress(OSError):
            written = path.lstat().st_mtime
            found.append((written, max(0.0, time.time() - written)))
    return found


class StaleHeartbeats:
    """Finds ranks of an attempt whose heartbeat has stopped; one thread polls it.

    Its clock stands still while it is not polled, as when this process was stopped together with the ranks, and while
    it cannot write to the storage itself, because then no rank can.
    """

    def __init__(self, run_dir: Path, attempt: str, limit_s: float) -> None:
        self._run_dir, self._attempt, self._limit_s = run_dir, attempt, limit_s
        self._refused: dict[str, str] = {}  # at the last poll
        self._warned: set[str] = set()
        self._longest_pause_s = limit_s / 10  # between two polls; longer pauses do not count
        self._polled_at, self._polled_s = time.monotonic(), 0.0
        self._last_change: dict[int, tuple[tuple[int, int], float]] = {}  # rank: (process, count), time of the change

    def silent(self, world_size: int | None = None) -> list[Beat]:
        """Returns the last heartbeats of ranks that have written none for the limit; ignores as `read_beats` does."""
        refused: dict[str, str] = {}
        try:
            write_line(self._run_dir / FOLDER / READER, json.dumps({"attempt": self._attempt}))
            beats = read_beats(self._run_dir, self._attempt, world_size, refused)
        except OSError as error:
            if isinstance(error, UnsafeFile):
                self._warn("heartbeats", f"heartbeats cannot be watched: {error}")
            self._polled_at = time.monotonic()
            return []
        if lasting := refused.keys() & self._refused.keys():  # no rank is just writing them
            name = min(lasting)
            others = f", as are {len(lasting) - 1} others" if len(lasting) > 1 else ""
            folder = self._run_dir / FOLDER
            self._warn(
                "files", f"{name!r} in {folder} is no heartbeat of a rank and is ignored{others}: {refused[name]}"
            )
        self._refused = refused
        now = time.monotonic()
        self._polled_s += min(now - self._polled_at, self._longest_pause_s)
        self._polled_at = now
        last_change = {}
        for rank, beat in beats.items():
            sign, known = (beat.process, beat.count), self._last_change.get(rank)
            last_change[rank] = known if known is not None and known[0] == sign else (sign, self._polled_s)
        self._last_change = last_change
        return [beat for rank, beat in beats.items() if self._polled_s - self._last_change[rank][1] > self._limit_s]

    def _warn(self, subject: str, sentence: str) -> None:
        """Logs a sentence, once on each subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning(sentence)

    def close(self) -> None:
        """Removes the reader's file."""
        with contextlib.suppress(OSError):
            (self._run_dir / FOLDER / READER).unlink(missing_ok=True)
            (self._run_dir / FOLDER).rmdir()


def write_line(path: Path, text: str) -> None:
    """Writes `text` in place with one call. Creates its folder, but not the run's, whose absence may be a mistake."""
    try:
        descriptor = open_to_write(path, private=True)
    except FileNotFoundError:
        make_folder(path.parent, private=True)
        descriptor = open_to_write(path, private=True)
    try:
        os.pwrite(descriptor, f"{text:<{LENGTH - 1}}\n".encode(), 0)
    finally:
        os.close(descriptor)


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / FOLDER / f"beat_{rank:04d}.json"
