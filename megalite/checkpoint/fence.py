"""The fence around a run's folder: an attempt that has been frozen writes nothing once another one has taken its place.

A machine that is paused takes no part in its lock's fate: a file server gives the lock away when its lease is over, and
the machine goes on later as if nothing had been. Whoever takes the lock writes its own name into it, so each rank looks
for that of its attempt before it writes. No clock of another host is read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from megalite.checkpoint.safe_files import read_small_file

log = logging.getLogger(__name__)

LONGEST_BYTES = 4096
EVERY_S = 1.0  # between two looks by those who write often
SAY_S = 2.0
FENCED_CODE = 1


class Fence:
    """The lock of a run's folder, and what it says as long as this attempt has it."""

    def __init__(self) -> None:
        self._lock: Path | None = None
        self._own, self._looked_at = b"", 0.0

    def read(self, lock: Path) -> str:
        """Returns what the lock says now, for all ranks of its attempt."""
        return _content(lock).decode(errors="replace")

    def begin(self, lock: Path, own: str) -> None:
        """Keeps this process inside while `lock` says what it does for its own attempt; not at all where that is ""."""
        self._lock, self._own = lock if own else None, own.encode()

    def check(self, *, at_most_every_s: float = 0.0) -> None:
        """Ends this process if another attempt has taken the folder."""
        now = time.monotonic()
        if self._lock is None or now - self._looked_at < at_most_every_s:
            return
        self._looked_at = now
        found = _content(self._lock)
        if found and found != self._own:
            sentence = (
                f"another attempt has taken {self._lock.parent} since this one was frozen: nothing more is written"
            )
            speaker = threading.Thread(target=log.error, args=("%s", sentence), daemon=True)
            speaker.start()  # not waited for: where nobody reads what a rank says, that would take for ever
            speaker.join(SAY_S)
            os._exit(FENCED_CODE)


def _content(lock: Path) -> bytes:
    try:
        return read_small_file(lock, LONGEST_BYTES, trusted=True)
    except OSError:  # storage that does not answer takes no writes either
        return b""


fence = Fence()
