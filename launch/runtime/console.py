"""Standard output and error of a rank that survive the loss of their reader.

The reader may be gone (ssh died), no longer read (a stopped terminal), or have no room (a full disk). None of this may
end a rank or keep it from saving: output that cannot be written goes to a file in the run's folder, if possible.
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

from launch.runtime.printing import open_closed_streams
from megalite.checkpoint.safe_files import write_small_file

PAUSE_S = 0.02
PATIENCE_S = 10.0  # for a reader that pauses
CHUNK_BYTES = select.PIPE_BUF  # a pipe that is ready takes this many bytes at once


class Console:
    """Both output streams of this process, as `keep_output_after_hangup` returns them."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._on_broken_pipe: Callable[[], None] | None = None
        self._is_broken = False

    def keep_in(self, path: Path, when_alone: Callable[[], None] | None = None) -> None:
        """Sets the file for lines that cannot be written, and a callback for the first broken pipe."""
        self._path, self._on_broken_pipe = path, when_alone

    def keep_unwritten(self, data: bytes, error: OSError | None) -> None:
        """Stores output that could not be written."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                write_small_file(self._path, data, append=True)
        if isinstance(error, BrokenPipeError) and self._on_broken_pipe is not None and not self._is_broken:
            self._is_broken = True
            self._on_broken_pipe()


class _Stream(io.RawIOBase):
    """Raw stream that writes to a descriptor and never fails."""

    def __init__(self, descriptor: int, keep_unwritten: Callable[[bytes, OSError | None], None]) -> None:
        self._descriptor, self._keep_unwritten = descriptor, keep_unwritten
        self._patience_s = PATIENCE_S
        self._own = _open_nonblocking(descriptor)
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
            while left:
                # errors count as ready; after a wait in vain, writes do not wait until the reader reads again
                if not self._ready.poll(1000 * max(0.0, deadline - time.monotonic())):
                    self._patience_s = 0.0
                    break
                try:
                    left = left[os.write(self._own, left[:CHUNK_BYTES]) :]
                    self._patience_s = PATIENCE_S
                    deadline = time.monotonic() + PATIENCE_S
                except BlockingIOError:  # a terminal may be ready for less than a chunk
                    if time.monotonic() >= deadline:
                        self._patience_s = 0.0
                        break
                    time.sleep(PAUSE_S)
        except OSError as caught:
            error = caught
        if left:
            self._keep_unwritten(left, error)
        return len(whole)


def _open_nonblocking(descriptor: int) -> int:
    """Opens a pipe or terminal a second time, non-blocking, without effect on other users; keeps files as they are."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor


def keep_output_after_hangup() -> Console:
    """Replaces stdout and stderr for the rest of this process."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries write to the descriptors themselves
    open_closed_streams()
    console = Console()
    for name, descriptor, encoding in (("stdout", 1, "utf-8"), ("stderr", 2, "utf-8")):
        stream = getattr(sys, name)
        if stream is not None:
            try:
                descriptor, encoding = stream.fileno(), stream.encoding
            except (AttributeError, OSError, ValueError):
                continue  # not backed by a file
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        raw = io.BufferedWriter(_Stream(descriptor, console.keep_unwritten))
        ours = io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, ours)
        setattr(sys, f"__{name}__", ours)
    return console
