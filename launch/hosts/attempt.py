"""One attempt of a run on several hosts: from the command that starts its ranks to the last of its processes.

Asked to end, it tells the ranks directly: a launcher that is told ends them without a save. Whatever goes wrong,
nothing of it is left on any host that answers, and on the others nothing beyond the agents' lease.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from launch.errors import INTERRUPTED_CODE, PREEMPTED_CODE
from launch.hosts.watch import Watch
from launch.processes import INTERRUPT_S, REPEAT_S, TICK_S, ProcessTree, StopSignals, told_by_launcher
from launch.supervise import Ended

KILLED_CODE = 128 + signal.SIGKILL
SSH_FAILED = 255
PASSED_ON = {signal.SIGHUP: signal.SIGTERM}  # of a terminal that is closed, ranks know nothing
LEAVE_S = 5.0  # what ranks have to leave by themselves after their launcher has
TELL_S = 2.0  # between two times that ranks are told, for those which have just been started


class HostsAttempt:
    """`command` runs on this host, under a keeper that ends it when this process dies."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        watch: Watch,
        grace_s: float,
        is_silent: Callable[[], str | None],
    ) -> None:
        """`is_silent`: what is wrong with the signs of life that ranks leave themselves, if anything is."""
        self._command = [sys.executable, "-m", "launch.keep", "0", *command]
        self._environment, self._watch, self._grace_s, self._is_silent = environment, watch, grace_s, is_silent
        self._asked: int | None = None  # the signal that ranks are to be told
        self._asked_at = self._told_at = 0.0
        self._deadline = float("inf")

    def run(self, signals: StopSignals) -> Ended:
        """To its end, whatever that is."""
        with ProcessTree(self._command, self._environment) as tree:
            ended = self._wait(tree, signals)
            if ended is None:
                ended = self._see_off(exit_code(tree.process.wait()), signals)
            stuck = self._watch.kill()
        return replace(ended, facts={**ended.facts, "stuck": stuck}) if stuck else ended

    def _wait(self, tree: ProcessTree, signals: StopSignals) -> Ended | None:
        """Until there is a reason to end the command; None: it has ended by itself."""
        while tree.process.poll() is None:
            time.sleep(TICK_S)
            tree.bury()
            while (noted := signals.take()) is not None:
                if self._must_end_now(*noted):
                    return Ended(128 + noted[0])
            if self._asked is not None and not self._tell():
                return Ended(asked_code(self._asked))
            if time.monotonic() > self._deadline:
                return Ended(KILLED_CODE)
            found = self._watch.problem()
            if found is not None:
                return Ended(KILLED_CODE, found[1], {"fault_on": found[0]})
            if (reason := self._is_silent()) is not None:
                return Ended(KILLED_CODE, reason)
        return None

    def _must_end_now(self, number: int, at: float) -> bool:
        """Takes a signal: Ctrl-C, and a SIGTERM or SIGHUP that is repeated, do not wait for a save."""
        if number == signal.SIGINT:
            return True
        if self._asked is None:
            self._asked, self._asked_at = PASSED_ON.get(signal.Signals(number), signal.Signals(number)), at
        elif at - self._asked_at > REPEAT_S and number in (signal.SIGTERM, signal.SIGHUP):
            return True
        if number in (signal.SIGTERM, signal.SIGHUP):  # who sends SIGUSR1 or SIGUSR2 has a limit of his own
            self._deadline = min(self._deadline, at + self._grace_s)
        return False

    def _tell(self) -> bool:
        """Tells the ranks; False where there are none yet, so that there is nothing to save."""
        now = time.monotonic()
        if now - self._told_at < TELL_S:
            return True
        is_first, self._told_at = self._told_at == 0.0, now
        answers = self._watch.ask_all("signal", INTERRUPT_S, number=int(self._asked or signal.SIGTERM))
        return not is_first or any(answer["ranks"] for answer in answers.values())

    def _see_off(self, code: int, signals: StopSignals) -> Ended:
        """The command has ended. Where that was not the ranks' doing, they are asked to save: somebody has killed their
        launcher, which says 0 then, or the number of a signal."""
        if 0 < code < 128 or not self._remain(LEAVE_S, signals):
            return Ended(code)
        left = self._watch.look_now()
        self._watch.ask_all("signal", INTERRUPT_S, number=int(signal.SIGTERM))
        self._remain(self._grace_s, signals)
        ranks = f"{left} rank{'s were' if left != 1 else ' was'}"
        return Ended(KILLED_CODE, f"{ranks} left behind by their launcher, which ended with {code}")

    def _remain(self, seconds: float, signals: StopSignals) -> bool:
        """Whether ranks are still there after so long; who asks to end now is not kept waiting."""
        deadline = time.monotonic() + seconds
        while self._watch.look_now():
            noted = signals.take()
            if time.monotonic() > deadline or (noted is not None and self._must_end_now(*noted)):
                return True
            time.sleep(TICK_S)
        return False


def asked_code(number: int) -> int:
    """Of an attempt that was asked to end by a signal when it had nothing to save."""
    return INTERRUPTED_CODE if number == signal.SIGINT else PREEMPTED_CODE


def exit_code(code: int) -> int:
    """128 + n for a command that signal n ended, and for one that says so of a rank; ssh's own code stays."""
    if code < 0:
        return 128 - code
    return code if code == SSH_FAILED else told_by_launcher(code)
