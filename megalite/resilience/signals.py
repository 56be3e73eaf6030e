"""Signals that ask a rank to end, taken also while its main thread waits in native code.

Python runs a signal handler in the main thread, which may wait for minutes in a rendezvous or a collective. So a thread
of its own reads the signals from a pipe (`signal.set_wakeup_fd`), and ends the process where it has to end at once:
until training begins, where there is nothing to save, and when a signal is repeated. No torch: a rank takes the signals
before it imports anything.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

INTERRUPTED_CODE = 130  # Ctrl-C
PREEMPTED_CODE = 75  # SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or training.max_minutes: starting again goes on
ANNOUNCEMENTS = (signal.SIGUSR1, signal.SIGUSR2)  # of an end; Slurm's --signal sends what one asks for
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *ANNOUNCEMENTS)
# Slurm signals each process of a job, so the same signal arrives directly and through a supervisor
REPEAT_S = 2.0
INTERRUPT_REPEAT_S = 0.5  # a person's second Ctrl-C; torchrun passes the first one on to ranks that got it themselves
START_UP = "during start-up, no step was taken"
SAY_S = 2.0  # for the last sentence, where nobody reads what a rank says

log = logging.getLogger(__name__)


def is_repeated(number: int, seconds: float) -> bool:
    """Returns whether a signal that arrives once more after `seconds` has been sent twice on purpose."""
    return seconds > (INTERRUPT_REPEAT_S if number == signal.SIGINT else REPEAT_S)


def exit_code_for(number: int) -> int:
    """Returns the exit code of a run that ends as signal `number` asks."""
    return INTERRUPTED_CODE if number == signal.SIGINT else PREEMPTED_CODE


class RankSignals:
    """The stop signals of this process, from `take_signals` on."""

    def __init__(self) -> None:
        self.logs = os.environ.get("LOCAL_RANK", "0") == "0"  # of several ranks on a host, one says why they end
        self.honors_repeated_signals = (
            True  # False: a supervisor sends signals more than once, and kills where that is wanted
        )
        self.when = START_UP  # ends the sentence about a signal that ends the process while it does not train
        self.first = 0  # the signal that asked training to end; 0: none
        self._received_at: dict[int, float] = {}  # signal -> time.monotonic
        self._describe: Callable[[int], str] | None = None  # while training
        self._parent = os.getppid()
        self._lock = threading.Lock()  # between training that ends and a signal that arrives
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in STOP_SIGNALS:
            # nohup and shells without job control have these ignored
            if number not in (signal.SIGHUP, signal.SIGINT) or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True).start()

    def begin_training(self, describe: Callable[[int], str]) -> None:
        """From now on the first signal is a request, kept in `first`, that `describe` answers with a sentence."""
        with self._lock:
            self._describe = describe

    def end_training(self) -> None:
        """From now on there is nothing to save: a signal ends the process, unless it has been asked to end already."""
        with self._lock:
            self._describe, self.when = None, "after the last step"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Keeps a request at once where the main thread runs Python."""
        if self._describe is not None:
            self.first = self.first or number

    def _watch(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._take(number, time.monotonic())

    def _take(self, number: int, now: float) -> None:
        with self._lock:
            is_first = not self._received_at
            began = self._received_at.setdefault(number, now)
            name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
            if self._describe is None and not self.first:
                self._leave(f"{name} {self.when}".strip(), exit_code_for(number))
            self.first = self.first or number
            if is_first and self._describe is not None:
                self._say(self._describe(number))
            elif self._ends_at_once(number, now - began):
                self._leave(f"{name} at once", 128 + number)

    def _ends_at_once(self, number: int, seconds: float) -> bool:
        # Linux repeats SIGTERM when the launcher that passed it on dies
        is_lasting = number in ANNOUNCEMENTS or not self.honors_repeated_signals or os.getppid() != self._parent
        return not is_lasting and is_repeated(number, seconds)

    def _leave(self, sentence: str, code: int) -> NoReturn:
        self._say(sentence)
        os._exit(code)

    def _say(self, sentence: str) -> None:
        """Logs a warning, without waiting for a console that nobody reads, or a lock that is held."""
        if not self.logs or not sentence:
            return
        speaker = threading.Thread(target=log.warning, args=("%s", sentence), daemon=True)
        speaker.start()
        speaker.join(SAY_S)


_taken: list[RankSignals] = []  # at most one: signal handlers belong to the process


def take_signals() -> RankSignals:
    """Takes the stop signals of this process; the same object each time. Main thread only."""
    if not _taken:
        _taken.append(RankSignals())
    return _taken[0]


def _forget_signals() -> None:
    """Gives a forked child its default handlers: it shares the pipe with its parent."""
    _taken.clear()
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
