"""Process trees: a command and everything it starts, how signals reach it, and how nothing of it is left. Linux only.

On the first stop signal, Ctrl-C among them, ranks finish their step, save, and end by themselves. A repeated one ends
everything at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import os
import re
import signal
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from megalite.resilience.signals import ANNOUNCEMENTS, STOP_SIGNALS, is_repeated

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TREES = "MEGALITE_TREES"  # environment variable of a tree's processes: ids of the trees they belong to, outermost first
TICK_S = 0.1
LINGER_S = 1.0  # for helper processes to end by themselves after the main process has
KILL_S = 30.0  # after this, the kernel cannot end a killed process, such as one that hangs in a file system


def end_with_parent(parent: int | None = None) -> None:
    """Makes Linux send this process SIGTERM when its parent dies, even by SIGKILL. Call it first thing in a child.

    `parent` is the parent's process id; without it, a parent that died before the call is not noticed.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


class StopSignals:
    """Context manager that records stop signals instead of ending the process. Main thread only."""

    def __init__(self) -> None:
        self.last: int | None = None  # the newest signal, taken or not
        self._received: deque[tuple[int, float]] = deque()
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup SIGHUP stays ignored
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.last = number
        self._received.append((number, time.monotonic()))

    def take(self) -> tuple[int, float] | None:
        """Returns the oldest signal not taken yet and when it arrived (`time.monotonic`)."""
        return self._received.popleft() if self._received else None


class ProcessTree:
    """A command, or several copies of it, each in a session of its own, and all their descendants.

    This process adopts descendants that are orphaned (it is a subreaper), and the end of the `with` block kills
    everything that still runs. If this process is killed, the commands get SIGTERM. Adopted processes of other trees,
    which process 1 of a container has as well, are only reaped once they have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        copies: Sequence[Mapping[str, str]] = ({},),
        is_alone: bool = False,
    ) -> None:
        """Starts `command` once for each of `copies`, variables that are added to its environment.

        `is_alone`: this process exists for the tree alone, so it adopts nothing else.
        """
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._is_alone, self._mark = is_alone, uuid.uuid4().hex
        trees = f"{environment.get(TREES, '')}:{self._mark}"
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for own in copies:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env={**environment, **own, TREES: trees},
                        start_new_session=True,
                        preexec_fn=partial(end_with_parent, os.getpid()),
                    )
                )
        except BaseException:
            self.kill()
            raise

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the first copy of the command."""
        return self.processes[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self, seconds: float) -> int | None:
        """Returns 0 once all copies of the command have ended with 0, or the code of one that ended with another.

        Returns None after `seconds`. The code is negative if a signal ended the command.
        """
        running = [process for process in self.processes if process.poll() is None]
        if running and not any(process.returncode for process in self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[0].wait(seconds)
        codes = [process.poll() for process in self.processes]
        failed = next((code for code in codes if code), None)
        return None if failed is None and None in codes else failed or 0

    def members(self) -> list[psutil.Process]:
        """Returns all running processes of the tree, adopted orphans among them."""
        family: list[psutil.Process] = []
        sessions = {process.pid for process in self.processes}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                is_own = self._is_alone or os.getsid(child.pid) in sessions
                if is_own or self._mark in child.environ().get(TREES, "").split(":"):
                    family += [child, *child.children(recursive=True)]
        return [process for process in family if _is_running(process)]

    def ranks(self) -> list[psutil.Process]:
        """Returns the processes that a launcher started as ranks, without what ranks start themselves."""
        inside: dict[int, psutil.Process] = {}
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= process.environ().keys():
                    inside[process.pid] = process

        def is_outermost(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return process.ppid() not in inside
            return True

        return list(filter(is_outermost, inside.values()))

    def commands(self) -> list[psutil.Process]:
        """Returns the running processes of the command itself, one per copy."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.poll() is None:
                    found.append(psutil.Process(process.pid))
        return found

    def signal_group(self, number: int) -> None:
        """Sends a signal to the command's process group."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def end(self, grace_s: float, until: Callable[[], object] = lambda: None) -> int:
        """Cleans up after the command has ended; returns how many processes it left behind.

        They get SIGTERM, and SIGKILL `grace_s` later, or as soon as `until` returns anything true.
        """
        self._wait_until_gone(LINGER_S, until)
        left = self.members()
        _send(left, signal.SIGTERM)
        if left:
            self._wait_until_gone(grace_s, until)
        self.kill()
        return len(left)

    def kill(self) -> None:
        """Kills every process, including those started meanwhile, until none is left or KILL_S is over."""
        deadline = time.monotonic() + KILL_S
        while (living := self.members()) and time.monotonic() < deadline:
            _send(living, signal.SIGKILL)
            time.sleep(0.01)
        for process in self.processes:
            if process.poll() is None and not living:
                process.wait()
        self.reap_zombies()

    def _wait_until_gone(self, seconds: float, until: Callable[[], object]) -> None:
        deadline = time.monotonic() + seconds
        while self.members() and time.monotonic() < deadline and not until():
            time.sleep(min(TICK_S, seconds / 10))

    def reap_zombies(self) -> None:
        """Collects adopted processes that have ended, but never the command's own."""
        own = {process.pid for process in self.processes}
        with contextlib.suppress(ChildProcessError):  # there are no children
            looks = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (dead := os.waitid(os.P_ALL, 0, looks)) is not None and dead.si_pid not in own:
                os.waitpid(dead.si_pid, 0)


class StopAction(enum.Enum):
    """Response to a stop signal."""

    FORWARD = enum.auto()
    IGNORE = enum.auto()  # the same signal arrived a moment ago
    KILL = enum.auto()  # everything, without waiting


class StopRequest:
    """Tracks how far a run has been asked to end. The rules are the same for a local command and for several hosts.

    The signals are for the ranks, which save and end; `grace_s` after the first SIGTERM or SIGHUP whatever still runs
    is to be killed (None: no limit). Whoever sends SIGUSR1 or SIGUSR2 early enough for a save has a limit of their own,
    and who presses Ctrl-C can press it again. A SIGINT, SIGTERM or SIGHUP that is repeated ends everything at once.
    """

    def __init__(self, grace_s: float | None) -> None:
        self._grace_s = grace_s
        self._received_at: dict[int, float] = {}  # signal -> time.monotonic
        self.first: int | None = None
        self.signal: int | None = None  # the newest one that the ranks are to get
        self.deadline = math.inf  # time.monotonic at which everything is killed
        self.is_urgent = False  # everything was to be killed at once

    def note(self, number: int, now: float) -> StopAction:
        """Takes a signal that arrived at `now`."""
        if number in self._received_at:
            if number in ANNOUNCEMENTS or not is_repeated(number, now - self._received_at[number]):
                return StopAction.IGNORE
            self.is_urgent = True
            return StopAction.KILL
        self._received_at[number] = now
        self.first, self.signal = self.first or number, number
        if self.deadline == math.inf and self._grace_s is not None and number in (signal.SIGTERM, signal.SIGHUP):
            self.deadline = now + self._grace_s
        return StopAction.FORWARD

    @property
    def was_interrupted(self) -> bool:
        """True if Ctrl-C came first."""
        return self.first == signal.SIGINT

    @property
    def rank_signal(self) -> int | None:
        """The signal that ranks get: SIGTERM instead of SIGHUP, because they have no terminal that could be closed."""
        return signal.SIGTERM if self.signal == signal.SIGHUP else self.signal


def wait_for(
    tree: ProcessTree,
    signals: StopSignals,
    stop: StopRequest,
    *,
    ranks: Callable[[], Iterable[psutil.Process]],
    otherwise: Callable[[int], None] = lambda number: None,
    until: Callable[[], object] = lambda: None,
) -> int:
    """Waits for the command and returns its exit code as `ProcessTree.wait` does, 128 + n if signal n ended it.

    Signals follow the rules of `stop`: they go to `ranks()`, or to `otherwise` while there are none. As soon as `until`
    returns anything true, everything is killed.
    """
    sent: set[tuple[int, int]] = set()  # (process id, signal)

    def signal_ranks() -> bool:
        """Sends the newest signal to ranks that have not got it, such as those just started. False without ranks."""
        if stop.signal is None or stop.rank_signal is None:
            return False
        running = list(ranks())
        for rank in running:
            if (rank.pid, stop.signal) not in sent:
                _send([rank], _suitable(rank, stop.rank_signal))
        sent.update((rank.pid, stop.signal) for rank in running)
        return bool(running)

    while (code := tree.wait(TICK_S)) is None:
        tree.reap_zombies()
        while (received := signals.take()) is not None:
            number, at = received
            match stop.note(number, at):
                case StopAction.KILL:
                    tree.kill()
                    return 128 + number
                case StopAction.FORWARD if not signal_ranks():
                    otherwise(number)
        signal_ranks()
        if until() or time.monotonic() > stop.deadline:
            tree.kill()
            return 128 + signal.SIGKILL
    return 128 - code if code < 0 else code


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _suitable(process: psutil.Process, number: int) -> int:
    """Returns SIGTERM for a SIGINT to a rank that still starts up, where Python would print a traceback."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)$", status, re.MULTILINE)
        has_own_handler = any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)
        if number == signal.SIGINT and masks and not has_own_handler:
            return signal.SIGTERM
    return number


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
