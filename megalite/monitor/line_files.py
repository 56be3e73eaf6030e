"""Files of one JSON object per line: rank 0 of a run appends to them, and others read them meanwhile and after a kill.

What is read is bounded by what is looked for, not by the length of the file: lines are in the order of their steps, so
those of the last steps are found from the end.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from megalite.checkpoint.durable_files import sync
from megalite.checkpoint.safe_files import open_to_write
from megalite.units import plural

LONGEST_LINE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 18  # of one look backwards, and of the text whose objects are in memory at once
MOST_WAITING_BYTES = 16 << 20  # of lines that storage has refused
KEPT_OPEN_S = 0.5  # of lines that follow each other faster; closing a file shows its lines to other hosts of a network
MOST_WITHOUT_STEP = 1000  # lines that are looked at for a step before one looks further back
STEP_FIRST = re.compile(rb'\{"step": ?(\d{1,18})[,}]')  # as our own lines begin


class LineFile:
    """Appends lines to a file. Threads may share it.

    Lines that storage refuses wait in memory, and are written before the next one. Of more than `MOST_WAITING_BYTES`
    the oldest are lost, and a line in the file says which.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._waiting: list[bytes] = []
        self._lost: list[bytes] = []  # the first and the last line that did not fit, none or both
        self._lost_lines = 0
        self._cut_after: float | None = None  # a step: lines of later ones are still to be dropped
        self._is_named = False  # on disk: the folder's entry of the file
        self._kept: IO[bytes] | None = None  # open, between lines that follow each other fast
        self._opened_at = self._written_at = 0.0  # time.monotonic
        self._end = 0  # size of the file behind our last line

    def append(self, line: str) -> None:
        """Appends a line, which ends with a newline. Raises OSError, UnsafeFile where the file is none that a run has
        made; the line waits then."""
        with self._lock:
            self._waiting.append(line.encode())
            while sum(map(len, self._waiting)) > MOST_WAITING_BYTES:
                self._lost = [*self._lost[:1], self._waiting.pop(0)] if self._lost else [self._waiting.pop(0)] * 2
                self._lost_lines += 1
            self._write()

    def cut_after(self, step: float) -> None:
        """Drops the lines of later steps, and half a line that a kill has left at the end. Raises what `append` does.

        The file gets shorter, in one call of the kernel: a kill leaves all lines, or those up to the step.
        """
        with self._lock:
            self._waiting = [line for line in self._waiting if (step_of(line) or 0) <= step]
            self._cut_after = step if self._cut_after is None else min(step, self._cut_after)
            self._write()

    def sync(self) -> None:
        """Writes what waits, and waits until all lines are on disk. Raises what `append` does."""
        with self._lock:
            self._write()
        descriptor = open_to_write(self._path)
        try:
            os.fdatasync(descriptor)  # without the lock: training may append meanwhile
        finally:
            os.close(descriptor)
        if not self._is_named:
            sync(self._path.parent)
            self._is_named = True

    def close(self) -> None:
        """Tries for the last time to write what waits. Raises OSError with the number of lines that are lost."""
        try:
            with self._lock:
                self._write()
                if (kept := self._kept) is not None:
                    self._kept = None
                    kept.close()
        except OSError as error:
            lost = [*self._lost, *self._waiting]
            count = self._lost_lines + len(self._waiting)
            raise OSError(f"{_these_lines(lost, count)} could not be written: {error}") from None

    def _write(self) -> None:
        if not self._waiting and self._cut_after is None:
            return
        with self._opened() as file:
            if self._cut_after is not None:
                with os.fdopen(os.dup(file.fileno()), "rb") as reader:
                    os.ftruncate(file.fileno(), _end_of_steps(reader, self._cut_after))
                self._cut_after = None
            data = b"".join(self._waiting)
            if self._lost:
                what = {"event": "lines_lost", "time": time.time(), "lost": _these_lines(self._lost, self._lost_lines)}
                data = json.dumps(what).encode() + b"\n" + data
            self._end = _append(file, data, self._end)
            self._waiting, self._lost, self._lost_lines = [], [], 0

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """The file, open for appending; opened anew after KEPT_OPEN_S, an error, or where it has been removed."""
        now, file, self._kept = time.monotonic(), self._kept, None
        if file is not None and (now - self._opened_at > KEPT_OPEN_S or not os.fstat(file.fileno()).st_nlink):
            file.close()
            file = None
        if file is None:
            file, self._opened_at = os.fdopen(open_to_write(self._path, append=True), "ab+", buffering=0), now
        try:
            yield file
            if now - self._written_at < KEPT_OPEN_S:
                self._kept = file
            self._written_at = now
        finally:
            if self._kept is None:
                file.close()


def _append(file: IO[bytes], data: bytes, end: int) -> int:
    """Appends all of it or nothing; returns the size of the file. It is one append of the kernel's, so threads do not
    mix their lines. If a kill has left half a line, the new one starts on a line of its own; none is before `end`."""
    if (size := file.seek(0, os.SEEK_END)) not in (0, end):
        file.seek(-1, os.SEEK_END)
        data = data if file.read(1) == b"\n" else b"\n" + data
    done = 0
    try:
        while done < len(data):  # a disk that is nearly full takes a part
            done += file.write(data[done:])
    except OSError:
        with suppress(OSError):
            if os.fstat(file.fileno()).st_size == size + done:  # nobody else has written meanwhile
                os.ftruncate(file.fileno(), size)
        raise
    return size + done


def whole_lines(file: IO[bytes], start: int = 0) -> Iterator[bytes]:
    """Yields the lines from the first that begins at `start` or behind it, without those of LONGEST_LINE_BYTES."""
    file.seek(max(0, start - 1))
    is_cut = start > 0
    while line := file.readline(LONGEST_LINE_BYTES):
        is_whole, is_cut = not is_cut and len(line) < LONGEST_LINE_BYTES, not line.endswith(b"\n")
        if is_whole:
            yield line


def stream_lines(path: Path, last_bytes: int | None = None, *, after_step: float = 0) -> Iterator[dict[str, Any]]:
    """Yields the objects in the order of writing; skips lines that a kill left half-written, and those that are long.

    With `last_bytes` only those at the end, with `after_step` those from the first line of a later step. Raises
    OSError.
    """
    return chain.from_iterable(stream_blocks(path, last_bytes, after_step=after_step))


def stream_blocks(
    path: Path, last_bytes: int | None = None, *, after_step: float = 0, every: int = 1, always: Collection[bytes] = ()
) -> Iterator[list[dict[str, Any]]]:
    """Yields what `stream_lines` does, some lines at a time.

    With `every` one line of as many is read, and all with one of the words `always` in them.
    """
    if not path.is_file():  # nor a named pipe, which would be waited for
        return
    with path.open("rb") as file:
        start = 0 if last_bytes is None else max(0, file.seek(0, os.SEEK_END) - last_bytes)
        if after_step > 0:
            start = max(start, _end_of_steps(file, after_step))
        block, size = list[dict[str, Any]](), 0
        for number, line in enumerate(whole_lines(file, start)):
            if number % every and not any(word in line for word in always):
                continue
            if (value := object_of(line)) is not None:
                block.append(value)
                size += len(line)
            if size >= BLOCK_BYTES:
                yield block
                block, size = [], 0
        yield block


def step_of(line: bytes) -> float | None:
    """Returns the step of a line; None if it has none."""
    if (found := STEP_FIRST.match(line)) is not None:
        return int(found[1])
    step = (object_of(line) or {}).get("step")
    return step if isinstance(step, int | float) else None


def object_of(line: bytes) -> dict[str, Any] | None:
    """Returns the object on a line; None if it holds none."""
    with suppress(ValueError):
        if isinstance(value := from_json(line), dict):
            return value
    return None


def _end_of_steps(file: IO[bytes], step: float) -> int:
    """Returns the offset behind the last whole line before that of a later step."""
    start = file.seek(0, os.SEEK_END)
    while start > 0:
        start = max(0, start - BLOCK_BYTES)
        file.seek(start)
        if b"\n" not in file.read(BLOCK_BYTES):  # the inside of a line, or what is none of ours
            continue
        lines = islice(whole_lines(file, start), MOST_WITHOUT_STEP)
        steps = (step_of(line) for line in lines if line.endswith(b"\n"))  # the last may be torn
        first = next((found for found in steps if found is not None), None)
        if first is not None and first <= step:
            break
    end = start
    for line in whole_lines(file, start):
        found = step_of(line)
        if (found is not None and found > step) or (not line.endswith(b"\n") and object_of(line) is None):
            break
        end = file.tell()
    return end


def _these_lines(lines: list[bytes], count: int) -> str:
    steps = [step for line in lines if (step := step_of(line)) is not None]
    return f"the lines of steps {steps[0]:g} to {steps[-1]:g}" if steps else plural(count, "line")
