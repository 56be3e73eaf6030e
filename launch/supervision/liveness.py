"""Detects ranks that no longer send heartbeats or are stopped, for a supervisor.

A rank that hangs but still runs ends itself (megalite/resilience/watchdog.py).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import psutil

from launch.runtime.logs import get_logger
from megalite.resilience.heartbeat import StaleHeartbeats, read_beats

log = get_logger(__name__)
POLL_S = 2.0
STOPPED_S = 10.0  # a rank that is stopped for longer does not go on by itself


class HeartbeatMonitor:
    """Use as `with HeartbeatMonitor(...) as heartbeats` while an attempt runs.

    Polls in a thread of its own, so that storage that hangs does not delay the handling of signals.
    """

    def __init__(
        self,
        run_dir: Path,
        attempt: str,
        limit_s: float,
        ranks: Callable[[], Iterable[psutil.Process]] = tuple,
        world_size: int | None = None,
    ) -> None:
        """`limit_s` is the timeout for ranks that have sent a heartbeat; 0 disables the monitor. `ranks` returns the
        ranks on this host, whose environment says how many there are where `world_size` is None."""
        self._run_dir, self._attempt, self._limit_s, self._ranks = run_dir, attempt, limit_s, ranks
        self._poll_s = min(POLL_S, limit_s / 20)
        self._world_size = world_size
        self._polls_stopped: dict[int, int] = {}  # process id -> number of polls in a row
        self._reason: str | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        if self._limit_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(POLL_S)

    def reason(self) -> str | None:
        """Returns why the attempt is to be ended, without a full stop; None if nothing is wrong."""
        return self._reason

    def _poll(self) -> None:
        stale = StaleHeartbeats(self._run_dir, self._attempt, self._limit_s)
        has_failed = False
        while not self._is_over.wait(self._poll_s) and self._reason is None:
            try:
                self._reason = self._stopped() or self._stale(stale)
            except (psutil.Error, OSError):
                pass  # of a process that ends at this moment
            except Exception as error:  # without this thread a rank that hangs would never be noticed
                if not has_failed:
                    log.warning(f"heartbeats could not be looked at, which is tried again: {error!r}")
                has_failed = True
        stale.close()

    def _stale(self, stale: StaleHeartbeats) -> str | None:
        here = socket.gethostname()
        silent = stale.silent(self._world_size or self._world_size_here())
        found = [beat for beat in silent if beat.host != here or psutil.pid_exists(beat.process)]
        if not found:  # a dead rank on this host is left to its launcher
            return None
        others = f", nor have {len(found) - 1} others" if len(found) > 1 else ""
        return f"{found[0]} has given no sign of life for {self._limit_s:g} s{others}"

    def _world_size_here(self) -> int | None:
        """Returns the number of all ranks that the first rank of this host was told; None if there is none."""
        for rank in self._ranks():
            with contextlib.suppress(psutil.Error, ValueError):
                return int(rank.environ().get("WORLD_SIZE", ""))
        return None

    def _stopped(self) -> str | None:
        """Counts polls instead of time, since this process may have been stopped too."""
        stopped = {}
        for process in self._ranks():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:  # by a signal; in a debugger it has another state
                    stopped[process.pid] = process
        self._polls_stopped = {pid: self._polls_stopped.get(pid, 0) + 1 for pid in stopped}
        seconds = min(STOPPED_S, self._limit_s)
        for pid, polls in self._polls_stopped.items():
            if polls * self._poll_s > seconds:
                with contextlib.suppress(psutil.Error):
                    return f"{self._name(stopped[pid])} has been stopped for {seconds:g} s"
        return None

    def _name(self, process: psutil.Process) -> str:
        rank = process.environ().get("RANK", "?")
        beats = read_beats(self._run_dir, self._attempt)
        known = next((str(beat) for beat in beats.values() if str(beat.rank) == rank), None)
        return known or f"rank {rank} on {socket.gethostname()} (process {process.pid})"
