"""One attempt of a run on several hosts: from the command that starts its ranks to the end of the last process.

Stop signals go to the ranks directly, because a launcher that gets one ends the ranks without a save. Whatever goes
wrong, nothing is left on any host that answers, and on the others nothing that outlives the agents' lease.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from launch.cluster.ssh.connection import HostConnection, HostError, Refused, in_parallel
from launch.runtime.logs import get_logger
from launch.runtime.processes import TICK_S, ProcessTree, StopAction, StopRequest, StopSignals
from launch.runtime.started_modules import REAPER, python_command
from launch.supervision.liveness import STOPPED_S
from launch.supervision.supervisor import AttemptEnd
from megalite.resilience.signals import exit_code_for

log = get_logger(__name__)
POLL_S = 2.0  # between two questions to a host
SIGNAL_S = 10.0  # timeout of a request to signal the ranks
KILL_S = 30.0  # timeout of a kill request; the agent gives the kernel 20 s
KILLED_CODE = 128 + signal.SIGKILL
SSH_FAILED = 255
LEAVE_S = 5.0  # for ranks to end by themselves after their launcher has
GONE_S = 8.0  # without a process of the attempt on a host, for the others to end by what its last rank has told them
ABSENT_S = 60.0  # for the first process of the attempt on a host, when others have ranks
RESEND_S = 2.0  # between two signals to the ranks, for those that have just been started


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
        # host -> number of ranks there, and since when it has no process of the attempt; None: it has some
        self._ranks = dict.fromkeys(connections, 0)
        self._empty_since: dict[str, float | None] = {}
        self._refused: set[str] = set()  # hosts of which a refusal has been logged
        self.unkilled: set[str] = set()  # hosts that have refused to kill: their lease is to go on
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._empty_since = dict.fromkeys(self._connections, time.monotonic() + ABSENT_S - GONE_S)
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

    def left_alone(self) -> tuple[str, str] | None:
        """Returns a host where the attempt has no process while others have ranks, and a sentence; None if none is."""
        now = time.monotonic()
        for name, since in self._empty_since.items():
            if since is not None and now - since > GONE_S and any(self._ranks.values()):
                return name, f"no process of the run is left on {name}, for which the ranks of other hosts wait"
        return None

    def lost(self) -> list[str]:
        """Returns the hosts that do not answer; their own agents have ended their ranks."""
        now = time.monotonic()
        return [name for name, connection in self._connections.items() if now - connection.heard > self._lease_s]

    def ask_all(
        self, action: str, timeout_s: float, names: Iterable[str] = (), **arguments: object
    ) -> tuple[dict[str, dict[str, Any]], dict[str, HostError]]:
        """Asks the hosts in `names`, by default all that are not lost; returns the answers, and why others failed."""
        asked = list(names) or [name for name in self._connections if name not in self.lost()]
        answers, failed = in_parallel(
            asked, lambda name: self._connections[name].ask(action, timeout_s=timeout_s, **arguments)
        )
        for name, error in failed.items():
            self._log_refusal(name, error)
        return answers, failed

    def _log_refusal(self, name: str, error: HostError) -> None:
        """Logs the first refusal of a host; of one that does not answer `problem` tells in time."""
        if isinstance(error, Refused) and name not in self._refused:
            self._refused.add(name)
            log.warning("%s", error)

    def count_ranks(self) -> int:
        """Asks all hosts how many ranks run there, and returns the sum; of one that fails, the last number counts."""
        answers, failed = self.ask_all("ranks", self._lease_s)
        return sum(len(answer["ranks"]) for answer in answers.values()) + sum(self._ranks[name] for name in failed)

    def kill(self) -> list[str]:
        """Ends every process of the attempt; returns the hosts where one may be left.

        For hosts that do not answer it waits until their agents must have done so; it gives up those that refuse.
        """
        answers: dict[str, dict[str, Any]] = {}
        patience_until = time.monotonic() + KILL_S
        while waiting := self._connections.keys() - answers.keys() - self.unkilled - set(self.lost()):
            done, failed = self.ask_all("kill", KILL_S, waiting)  # repeated after a reconnection
            answers |= done
            for name, error in failed.items():
                if isinstance(error, Refused) and time.monotonic() > patience_until:
                    self.unkilled.add(name)
                    log.warning("%s: look there for processes of the run that are left, and end them", error)
            time.sleep(0.1)
        return [*(name for name, answer in answers.items() if answer["left"]), *sorted(self.unkilled)]

    def _poll(self, name: str) -> None:
        while not self._is_over.wait(POLL_S):
            connection = self._connections[name]
            try:
                if not connection.is_open:  # the agent, or ssh, was killed
                    connection.close()
                    heard = connection.heard
                    connection = self._reconnect(name)
                    connection.heard = heard  # the new agent does not guard the ranks yet
                    connection.ask("guard", timeout_s=self._lease_s, **self._guard)
                    self._connections[name] = connection
                answer, now = connection.ask("ranks", timeout_s=self._lease_s), time.monotonic()
                self._ranks[name] = len(answer["ranks"])
                if answer["processes"]:
                    self._empty_since[name] = None
                elif self._empty_since[name] is None:
                    self._empty_since[name] = now
                seen = self._stopped[name]
                stopped = {one["process"]: one["rank"] for one in answer["ranks"] if one["state"] == "T"}
                self._stopped[name] = {pid: (rank, seen.get(pid, (rank, now))[1]) for pid, rank in stopped.items()}
            except HostError as error:
                self._log_refusal(name, error)
                if connection is not self._connections[name]:  # its agent does not guard the ranks
                    connection.close()


class HostsAttempt:
    """Runs `command` on this host, under a reaper that ends it when this process dies."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        monitor: HostMonitor,
        grace_s: float,
        stale_reason: Callable[[], str | None],
        has_started: Callable[[], bool] = lambda: True,
    ) -> None:
        """`stale_reason` returns what is wrong with the heartbeats of the ranks, None if nothing is. Until
        `has_started`, ranks of one host wait for those of another; later they notice by themselves that it is gone."""
        self._command = python_command(REAPER, "0", *command)
        self._environment, self._monitor, self._grace_s = environment, monitor, grace_s
        self._stale_reason, self._has_started = stale_reason, has_started
        self._stop = StopRequest(grace_s)
        self._signalled_at, self._has_signalled = 0.0, False

    def run(self, signals: StopSignals) -> AttemptEnd:
        """Runs the command to its end, and kills what is left of the attempt on all hosts."""
        with ProcessTree(self._command, self._environment) as tree:
            ended = self._wait(tree, signals)
            if ended is None:
                ended = self._drain_ranks(exit_code(tree.process.wait()), signals)
            stuck = self._monitor.kill()
        return replace(ended, facts={**ended.facts, "stuck": stuck}) if stuck else ended

    def _wait(self, tree: ProcessTree, signals: StopSignals) -> AttemptEnd | None:
        """Waits until there is a reason to end the command; returns None if it has ended by itself."""
        has_started = False
        while tree.process.poll() is None:
            time.sleep(TICK_S)
            tree.reap_zombies()
            while (received := signals.take()) is not None:
                if self._stop.note(*received) is StopAction.KILL:
                    return AttemptEnd(128 + received[0])
            if self._stop.first is not None and not self._signal_ranks():
                return AttemptEnd(exit_code_for(self._stop.first))
            if time.monotonic() > self._stop.deadline:
                return AttemptEnd(KILLED_CODE)
            problem = self._monitor.problem()
            if problem is None and not has_started and (problem := self._monitor.left_alone()) is not None:
                has_started = self._has_started()
                problem = None if has_started else problem
            if problem is not None:
                host, reason = problem
                return AttemptEnd(KILLED_CODE, reason, {"fault_on": host})
            if (stale := self._stale_reason()) is not None:
                return AttemptEnd(KILLED_CODE, stale)
        return None

    def _signal_ranks(self) -> bool:
        """Sends the stop signal to all ranks every RESEND_S; False if no host has ranks yet, nothing to save."""
        now = time.monotonic()
        if now - self._signalled_at < RESEND_S:
            return True
        self._signalled_at = now
        answers, failed = self._monitor.ask_all("signal", SIGNAL_S, number=self._stop.rank_signal)
        self._has_signalled = self._has_signalled or any(answer["ranks"] for answer in answers.values())
        return self._has_signalled or bool(failed)

    def _drain_ranks(self, code: int, signals: StopSignals) -> AttemptEnd:
        """Handles ranks that survive the command.

        Their launcher was killed then, and ended with 0 or the number of a signal. They get SIGTERM, so that they save,
        and the attempt counts as a crash.
        """
        if 0 < code < 128 or not self._outlast(LEAVE_S, signals):
            return AttemptEnd(code)
        left = self._monitor.count_ranks()
        self._monitor.ask_all("signal", SIGNAL_S, number=int(signal.SIGTERM))
        self._outlast(self._grace_s, signals)
        ranks = f"{left} rank{'s were' if left != 1 else ' was'}"
        return AttemptEnd(KILLED_CODE, f"{ranks} left behind by their launcher, which ended with {code}")

    def _outlast(self, seconds: float, signals: StopSignals) -> bool:
        """Returns whether ranks still run after `seconds`, or earlier when a signal asks to kill them now."""
        deadline = time.monotonic() + seconds
        while self._monitor.count_ranks():
            received = signals.take()
            kills_now = received is not None and self._stop.note(*received) is StopAction.KILL
            if kills_now or time.monotonic() > deadline:
                return True
            time.sleep(TICK_S)
        return False


def exit_code(code: int) -> int:
    """Converts a return code to 128 + n if signal n ended the command or a rank; ssh's own failure code stays."""
    if code < 0:
        return 128 - code
    # DeepSpeed's launcher exits with -n, which is 256 - n, where signal n ended a rank
    return 384 - code if code > 256 - signal.NSIG and code != SSH_FAILED else code
