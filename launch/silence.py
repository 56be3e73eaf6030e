"""Ranks that do nothing any more and cannot say so, as a supervisor finds them: no signs of life, or stopped.

What hangs but lives ends itself (megalite/resilience/watchdog.py).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import psutil

from megalite.resilience.heartbeat import Silence, read_beats

ATTEMPT = "MEGALITE_ATTEMPT"  # in the environment of an attempt's ranks: its name, and that somebody listens to them
LOOK_S = 2.0
STOPPED_S = 10.0  # then a rank that is stopped is no accident of a moment


class Watcher:
    """`with Watcher(...) as watcher`, while an attempt runs.

    Looks in a thread of its own: a storage that hangs must not keep anybody from his signals.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: str,
        limit_s: float,
        ranks: Callable[[], Iterable[psutil.Process]] = tuple,
    ) -> None:
        """`limit_s`: how long a rank that was heard once may be silent; 0: nobody looks. `ranks`: those whose
        processes can be seen here."""
        self._run_dir, self._attempt, self._limit_s, self._ranks = run_dir, attempt, limit_s, ranks
        self._look_s = min(LOOK_S, limit_s / 20)
        self._looks_stopped: dict[int, int] = {}  # process: at how many looks in a row
        self._reason: str | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)

    def __enter__(self) -> Self:
        if self._limit_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_S)

    def reason(self) -> str | None:
        """Why the attempt is to be ended, a sentence without its full stop."""
        return self._reason

    def _watch(self) -> None:
        silence = Silence(self._run_dir, self._attempt, self._limit_s)
        while not self._is_over.wait(self._look_s) and self._reason is None:
            with contextlib.suppress(psutil.Error, OSError):  # of what ends at this moment
                self._reason = self._stopped() or self._silent(silence)
        silence.close()

    def _silent(self, silence: Silence) -> str | None:
        here = socket.gethostname()
        found = [beat for beat in silence.silent() if beat.host != here or psutil.pid_exists(beat.process)]
        if not found:  # who is dead has ended, and its launcher sees to the others
            return None
        others = f", nor have {len(found) - 1} others" if len(found) > 1 else ""
        return f"{found[0]} has given no sign of life for {self._limit_s:g} s{others}"

    def _stopped(self) -> str | None:
        """Counted in looks: if this process was stopped too, it did not look."""
        stopped = {process.pid: process for process in self._ranks() if _is_stopped(process)}
        self._looks_stopped = {pid: self._looks_stopped.get(pid, 0) + 1 for pid in stopped}
        seconds = min(STOPPED_S, self._limit_s)
        for pid, looks in self._looks_stopped.items():
            if looks * self._look_s > seconds:
                with contextlib.suppress(psutil.Error):
                    return f"{self._name(stopped[pid])} has been stopped for {seconds:g} s"
        return None

    def _name(self, process: psutil.Process) -> str:
        rank = process.environ().get("RANK", "?")
        beats = read_beats(self._run_dir, self._attempt)
        known = next((str(beat) for beat in beats.values() if str(beat.rank) == rank), None)
        return known or f"rank {rank} on {socket.gethostname()} (process {process.pid})"


def _is_stopped(process: psutil.Process) -> bool:
    """By a signal; what a debugger holds has another state."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
