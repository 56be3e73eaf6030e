"""Monitors the hosts of one attempt: which of them answer, what their ranks are doing, and what is wrong."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from launch.cluster.ssh.connection import HostConnection, HostError, in_parallel
from launch.supervision.liveness import STOPPED_S

POLL_S = 2.0  # between two questions to a host
KILL_S = 30.0  # timeout of a kill request; the agent gives the kernel 20 s


class HostMonitor:
    """Polls each host in a thread of its own and reconnects where a connection breaks.

    Use as `with HostMonitor(...) as monitor`; the connections stay open afterwards.
    """

    def __init__(
        self,
        connections: dict[str, HostConnection],
        guard: Mapping[str, Any],
        reconnect: Callable[[str], HostConnection],
        lease_s: float,
    ) -> None:
        """`guard` holds the arguments of the `guard` request, which a new agent gets after a reconnection."""
        self._connections, self._guard, self._reconnect, self._lease_s = connections, guard, reconnect, lease_s
        # host -> process id of a rank that is stopped -> its number, and time.monotonic when that was first seen
        self._stopped: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in connections}
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        for name in self._connections:
            threading.Thread(target=self._poll, args=(name,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def problem(self) -> tuple[str, str] | None:
        """Returns a host that no longer answers or has a stopped rank, and a sentence about it; None if all is well."""
        now = time.monotonic()
        for name, connection in self._connections.items():
            silent_s = now - connection.heard
            if silent_s > self._lease_s + POLL_S / 2:
                return name, f"host {name} has not answered for {silent_s:.0f} s"
            for process, (rank, since) in self._stopped[name].items():
                if now - since > STOPPED_S:
                    return name, f"rank {rank} (process {process} on {name}) has been stopped for {now - since:.0f} s"
        return None

    def lost(self) -> list[str]:
        """Returns the hosts that do not answer; their own agents have ended their ranks."""
        now = time.monotonic()
        return [name for name, connection in self._connections.items() if now - connection.heard > self._lease_s]

    def ask_all(
        self, action: str, timeout_s: float, names: Iterable[str] = (), **arguments: object
    ) -> dict[str, dict[str, Any]]:
        """Returns the answers of the hosts in `names`, by default of all hosts that are not lost."""
        asked = list(names) or [name for name in self._connections if name not in self.lost()]
        answers, _ = in_parallel(
            asked, lambda name: self._connections[name].ask(action, timeout_s=timeout_s, **arguments)
        )
        return answers

    def count_ranks(self) -> int:
        """Asks all hosts how many ranks run there now, and returns the sum."""
        return sum(len(answer["ranks"]) for answer in self.ask_all("ranks", self._lease_s).values())

    def kill(self) -> list[str]:
        """Ends every process of the attempt; returns the hosts where the kernel could not end one.

        For hosts that do not answer it waits until their agents must have done so.
        """
        answers: dict[str, dict[str, Any]] = {}
        while waiting := self._connections.keys() - answers.keys() - set(self.lost()):
            answers |= self.ask_all("kill", KILL_S, waiting)  # repeated after a reconnection
            time.sleep(0.1)
        return [name for name, answer in answers.items() if answer["left"]]

    def _poll(self, name: str) -> None:
        while not self._is_over.wait(POLL_S):
            with contextlib.suppress(HostError):
                connection = self._connections[name]
                if not connection.is_open:  # the agent, or ssh, was killed
                    connection.close()
                    heard = connection.heard
                    connection = self._reconnect(name)
                    connection.heard = heard  # the new agent does not guard the ranks yet
                    connection.ask("guard", timeout_s=self._lease_s, **self._guard)
                    self._connections[name] = connection
                answer, now = connection.ask("ranks", timeout_s=self._lease_s), time.monotonic()
                seen = self._stopped[name]
                stopped = {one["process"]: one["rank"] for one in answer["ranks"] if one["state"] == "T"}
                self._stopped[name] = {pid: (rank, seen.get(pid, (rank, now))[1]) for pid, rank in stopped.items()}
