"""One attempt of a run on several hosts: from the command that starts its ranks to the end of the last process.

Stop signals go to the ranks directly, because a launcher that gets one ends the ranks without a save. Whatever goes
wrong, nothing is left on any host that answers, and on the others nothing that outlives the agents' lease.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launch.cluster.host_monitor import HostMonitor
from launch.errors import PREEMPTED_CODE
from launch.runtime.modules import REAPER
from launch.runtime.processes import (
    INTERRUPT_S,
    TICK_S,
    ProcessTree,
    StopAction,
    StopRequest,
    StopSignals,
    decode_launcher_exit_code,
)
from launch.supervision.supervisor import AttemptEnd

KILLED_CODE = 128 + signal.SIGKILL
SSH_FAILED = 255
LEAVE_S = 5.0  # for ranks to end by themselves after their launcher has
RESEND_S = 2.0  # between two signals to the ranks, for those that have just been started


class HostsAttempt:
    """Runs `command` on this host, under a reaper that ends it when this process dies."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        monitor: HostMonitor,
        grace_s: float,
        stale_reason: Callable[[], str | None],
    ) -> None:
        """`stale_reason` returns what is wrong with the heartbeats of the ranks, None if nothing is."""
        self._command = [sys.executable, "-m", REAPER, "0", *command]
        self._environment, self._monitor, self._grace_s = environment, monitor, grace_s
        self._stale_reason = stale_reason
        self._stop = StopRequest(grace_s, interrupt_s=0)
        self._signalled_at = 0.0

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
        while tree.process.poll() is None:
            time.sleep(TICK_S)
            tree.reap_zombies()
            while (received := signals.take()) is not None:
                if self._stop.note(*received) is StopAction.KILL:
                    return AttemptEnd(128 + received[0])
            if self._stop.signal is not None and not self._signal_ranks():
                return AttemptEnd(PREEMPTED_CODE)
            if time.monotonic() > self._stop.deadline:
                return AttemptEnd(KILLED_CODE)
            if (problem := self._monitor.problem()) is not None:
                host, reason = problem
                return AttemptEnd(KILLED_CODE, reason, {"fault_on": host})
            if (stale := self._stale_reason()) is not None:
                return AttemptEnd(KILLED_CODE, stale)
        return None

    def _signal_ranks(self) -> bool:
        """Sends the stop signal to all ranks every RESEND_S; False if there are no ranks yet, so nothing to save."""
        now = time.monotonic()
        if now - self._signalled_at < RESEND_S:
            return True
        is_first, self._signalled_at = self._signalled_at == 0.0, now
        answers = self._monitor.ask_all("signal", INTERRUPT_S, number=self._stop.rank_signal)
        return not is_first or any(answer["ranks"] for answer in answers.values())

    def _drain_ranks(self, code: int, signals: StopSignals) -> AttemptEnd:
        """Handles ranks that survive the command.

        Their launcher was killed then, and ended with 0 or the number of a signal. They get SIGTERM, so that they save,
        and the attempt counts as a crash.
        """
        if 0 < code < 128 or not self._outlast(LEAVE_S, signals):
            return AttemptEnd(code)
        left = self._monitor.count_ranks()
        self._monitor.ask_all("signal", INTERRUPT_S, number=int(signal.SIGTERM))
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
    return code if code == SSH_FAILED else decode_launcher_exit_code(code)
