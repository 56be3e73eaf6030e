"""Eyes on the hosts of one attempt: which answer, what their ranks are doing, and what is wrong with them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.hosts.connection import HostConnection, HostError, in_parallel

LOOK_S = 2.0  # between two looks at a host
STOPPED_S = 10.0  # then a rank that is stopped is no accident of a moment
KILL_S = 30.0  # for an answer to an order to kill; the agent gives the kernel 20


@dataclass
class _Seen:
    """What is known of one host."""

    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)  # process -> rank, state
    stopped_since: dict[int, float] = field(default_factory=dict)  # process -> time.monotonic


class Watch:
    """Looks at each host every few seconds, in a thread of its own, and connects anew where a connection breaks.

    `with Watch(...) as watch:`; the connections stay open.
    """

    def __init__(
        self,
        connections: dict[str, HostConnection],
        guard: Mapping[str, Any],
        reconnect: Callable[[str], HostConnection],
        lease_s: float,
    ) -> None:
        """`guard`: what agents were told when they began to guard, for one that is started anew."""
        self._connections, self._guard, self._reconnect, self._lease_s = connections, guard, reconnect, lease_s
        self._seen = {name: _Seen() for name in connections}
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._look, args=(name,), daemon=True) for name in connections]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def problem(self) -> tuple[str, str] | None:
        """A host and what is wrong with it, if something is: it does not answer any more, or a rank is stopped."""
        now = time.monotonic()
        for name, connection in self._connections.items():
            silent_s = now - connection.heard
            if silent_s > self._lease_s + LOOK_S / 2:
                return name, f"host {name} has not answered for {silent_s:.0f} s"
            for process, since in dict(self._seen[name].stopped_since).items():
                if now - since > STOPPED_S:
                    rank = self._seen[name].ranks.get(process, {}).get("rank", "?")
                    return name, f"rank {rank} (process {process} on {name}) has been stopped for {now - since:.0f} s"
        return None

    def ranks(self) -> int:
        """How many there were at the last look, on all hosts."""
        return sum(len(seen.ranks) for seen in self._seen.values())

    def lost(self) -> list[str]:
        """Hosts that do not answer; their own agents have ended their ranks."""
        now = time.monotonic()
        return [name for name, connection in self._connections.items() if now - connection.heard > self._lease_s]

    def ask_all(
        self, action: str, timeout_s: float, names: Iterable[str] = (), **arguments: object
    ) -> dict[str, dict[str, Any]]:
        """Answers of the hosts that are there, or of those named."""
        there = list(names) or [name for name in self._connections if name not in self.lost()]
        answers, _ = in_parallel(
            there, lambda name: self._connections[name].ask(action, timeout_s=timeout_s, **arguments)
        )
        return answers

    def look_now(self) -> int:
        """How many ranks there are at this moment on the hosts that answer."""
        return sum(len(answer["ranks"]) for answer in self.ask_all("ranks", self._lease_s).values())

    def kill(self) -> list[str]:
        """Ends every process of the attempt: here, or, on hosts that do not answer, by waiting until their agents must
        have done it. The hosts where the kernel could not end one."""
        answers: dict[str, dict[str, Any]] = {}
        while waiting := self._connections.keys() - answers.keys() - set(self.lost()):
            answers |= self.ask_all("kill", KILL_S, waiting)  # again where a connection has just been made anew
            time.sleep(0.1)
        return [name for name, answer in answers.items() if answer["left"]]

    def _look(self, name: str) -> None:
        while not self._is_over.wait(LOOK_S):
            with contextlib.suppress(HostError):
                connection = self._connections[name]
                if not connection.is_open:  # the agent, or ssh, was killed
                    connection.close()
                    heard = connection.heard
                    connection = self._reconnect(name)
                    connection.heard = heard  # nobody guards yet
                    connection.ask("guard", timeout_s=self._lease_s, **self._guard)
                    self._connections[name] = connection
                self._note(self._seen[name], connection.ask("ranks", timeout_s=self._lease_s))

    @staticmethod
    def _note(seen: _Seen, answer: dict[str, Any]) -> None:
        now = time.monotonic()
        seen.ranks = {one["process"]: one for one in answer["ranks"]}
        stopped = [process for process, one in seen.ranks.items() if one["state"] == "T"]
        seen.stopped_since = {process: seen.stopped_since.get(process, now) for process in stopped}
