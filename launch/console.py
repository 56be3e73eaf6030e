"""Standard output and error of a rank, which outlive whoever reads them.

The reader may be gone (ssh died), not read any more (a stopped terminal), or have no room (a full disk). None of this
may end a rank, or keep it from saving: what cannot be written goes to a file in the run's folder, if that can be.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAUSE_S = 0.02
PATIENCE_S = 10.0  # for a reader that has not read for a moment
AT_ONCE = select.PIPE_BUF  # bytes that a pipe takes whole, once it says that it takes any


class Console:
    """Both streams of this process, from `outlive_readers`."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._told: Callable[[], None] | None = None
        self._is_alone = False

    def keep_in(self, path: Path, when_alone: Callable[[], None] | None = None) -> None:
        """Where lines go that nobody takes, and what is called once when a reader has gone."""
        self._path, self._told = path, when_alone

    def lose(self, data: bytes, error: OSError | None) -> None:
        """Keeps what could not be written."""
        if self._path is not None:
            with contextlib.suppress(OSError), self._path.open("ab") as file:
                file.write(data)
        if isinstance(error, BrokenPipeError) and self._told is not None and not self._is_alone:
            self._is_alone = True
            self._told()


class _Stream(io.RawIOBase):
    """Writes to a descriptor and never fails."""

    def __init__(self, descriptor: int, lose: Callable[[bytes, OSError | None], None]) -> None:
        self._descriptor, self._lose = descriptor, lose
        self._patience_s = PATIENCE_S
        self._own = _not_blocking(descriptor)
        self._ready = select.poll()
        self._ready.register(self._own, select.POLLOUT)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        left = whole = bytes(data)
        error, deadline = None, time.monotonic() + self._patience_s
        try:
            while left and self._takes_more(deadline):
                try:
                    left = left[os.write(self._own, left[:AT_ONCE]) :]
                    self._patience_s = PATIENCE_S
                    deadline = time.monotonic() + PATIENCE_S
                except BlockingIOError:  # a terminal that takes something takes less than this
                    if time.monotonic() >= deadline:
                        self._patience_s = 0.0
                        break
                    time.sleep(PAUSE_S)
        except OSError as caught:
            error = caught
        if left:
            self._lose(left, error)
        return len(whole)

    def _takes_more(self, deadline: float) -> bool:
        """Waits once for a reader that does not read; from then on it has to come back by itself."""
        is_ready = bool(self._ready.poll(1000 * max(0.0, deadline - time.monotonic())))  # an error is for the write
        if not is_ready:
            self._patience_s = 0.0
        return is_ready


def _not_blocking(descriptor: int) -> int:
    """A pipe or a terminal opened once more, for us alone, so that no write to it waits; others stay as they are."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def outlive_readers() -> Console:
    """Takes stdout and stderr over, at the start of a process and to its end."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries write to the descriptors themselves
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened, perhaps a checkpoint, would be written into
            os.open(os.devnull, os.O_RDWR)
    console = Console()
    for name, descriptor, encoding in (("stdout", 1, "utf-8"), ("stderr", 2, "utf-8")):
        stream = getattr(sys, name)
        if stream is not None:
            try:
                descriptor, encoding = stream.fileno(), stream.encoding
            except (AttributeError, OSError, ValueError):
                continue  # no file
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        raw = io.BufferedWriter(_Stream(descriptor, console.lose))
        ours = io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, ours)
        setattr(sys, f"__{name}__", ours)
    return console
