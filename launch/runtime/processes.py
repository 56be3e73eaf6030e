"""Process trees: a command and everything it starts, how signals reach it, and how nothing of it is left. Linux only.

On the first stop signal ranks finish their step, save, and end by themselves. A repeated one, or Ctrl-C, ends
everything at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import os
import signal
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Self

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TREES = "MEGALITE_TREES"  # environment variable of a tree's processes: ids of the trees they belong to, outermost first
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TICK_S = 0.1
REPEAT_S = 2.0  # Slurm signals each process of a job, so the same signal arrives directly and through a supervisor
INTERRUPT_S = 10.0  # for clean-up after Ctrl-C
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
    """A command in a session of its own, and all its descendants.

    This process adopts descendants that are orphaned (it is a subreaper), and the end of the `with` block kills
    everything that still runs. If this process is killed, the command gets SIGTERM. Adopted processes of other trees,
    which process 1 of a container has as well, are only reaped once they have ended.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, is_alone: bool = False) -> None:
        """Starts `command`. `is_alone`: this process exists for the tree alone, so it adopts nothing else."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._is_alone, self._mark = is_alone, uuid.uuid4().hex
        self.process = subprocess.Popen(
            command,
            env={**environment, TREES: f"{environment.get(TREES, '')}:{self._mark}"},
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def members(self) -> list[psutil.Process]:
        """Returns all running processes of the tree, adopted orphans among them."""
        family: list[psutil.Process] = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                is_own = self._is_alone or os.getsid(child.pid) == self.process.pid
                if is_own or self._mark in child.environ().get(TREES, "").split(":"):
                    family += [child, *child.children(recursive=True)]
        return [process for process in family if _is_running(process)]

    def ranks(self) -> list[psutil.Process]:
        """Returns the processes that deepspeed or torchrun started as ranks, without what ranks start themselves."""
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

    def children(self) -> list[psutil.Process]:
        """Returns the running child processes of the command's own process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in psutil.Process(self.process.pid).children() if _is_running(child)]
        return []

    def signal_group(self, number: int) -> None:
        """Sends a signal to the command's process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def end(self, grace_s: float) -> int:
        """Cleans up after the command's own process has ended; returns how many processes it left behind.

        They get SIGTERM, and SIGKILL `grace_s` later.
        """
        self._wait_until_gone(LINGER_S)
        left = self.members()
        _send(left, signal.SIGTERM)
        if left:
            self._wait_until_gone(grace_s)
        self.kill()
        return len(left)

    def kill(self) -> None:
        """Kills every process, including those started meanwhile, until none is left or KILL_S is over."""
        deadline = time.monotonic() + KILL_S
        while (living := self.members()) and time.monotonic() < deadline:
            _send(living, signal.SIGKILL)
            time.sleep(0.01)
        if self.process.poll() is None and not living:
            self.process.wait()
        self.reap_zombies()

    def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.members() and time.monotonic() < deadline:
            time.sleep(min(TICK_S, seconds / 10))

    def reap_zombies(self) -> None:
        """Collects adopted processes that have ended, but never the command's own."""
        with contextlib.suppress(ChildProcessError):  # there are no children
            looks = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (dead := os.waitid(os.P_ALL, 0, looks)) is not None and dead.si_pid != self.process.pid:
                os.waitpid(dead.si_pid, 0)


class StopAction(enum.Enum):
    """Response to a stop signal."""

    FORWARD = enum.auto()
    IGNORE = enum.auto()  # the same signal arrived a moment ago
    KILL = enum.auto()  # everything, without waiting


class StopRequest:
    """Tracks how far a run has been asked to end. The rules are the same for a local command and for several hosts.

    SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are for the ranks, which save and end; `grace_s` after the first SIGTERM or
    SIGHUP whatever still runs is to be killed (None: no limit). Whoever sends SIGUSR1 or SIGUSR2 early enough for a
    save has a limit of their own. SIGINT leaves `interrupt_s` for clean-up. A SIGTERM, SIGINT or SIGHUP that is
    repeated after REPEAT_S, and a SIGINT with an `interrupt_s` of 0, ends everything at once.
    """

    def __init__(self, grace_s: float | None, interrupt_s: float) -> None:
        self._grace_s, self._interrupt_s = grace_s, interrupt_s
        self._received_at: dict[int, float] = {}  # signal -> time.monotonic
        self.signal: int | None = None  # the newest one that the ranks are to get
        self.deadline = math.inf  # time.monotonic at which everything is killed
        self.was_interrupted = False

    def note(self, number: int, now: float) -> StopAction:
        """Takes a signal that arrived at `now`."""
        if number in self._received_at:
            kills = now - self._received_at[number] > REPEAT_S and number not in (signal.SIGUSR1, signal.SIGUSR2)
            return StopAction.KILL if kills else StopAction.IGNORE
        self._received_at[number] = now
        if number == signal.SIGINT:
            self.was_interrupted, self.deadline = True, now + self._interrupt_s
            return StopAction.FORWARD if self._interrupt_s else StopAction.KILL
        self.signal = number
        if self.deadline == math.inf and self._grace_s is not None and number in (signal.SIGTERM, signal.SIGHUP):
            self.deadline = now + self._grace_s
        return StopAction.FORWARD

    @property
    def rank_signal(self) -> int | None:
        """The signal that ranks get: SIGTERM instead of SIGHUP, because they have no terminal that could be closed."""
        return signal.SIGTERM if self.signal == signal.SIGHUP else self.signal


def wait_for(
    tree: ProcessTree,
    signals: StopSignals,
    *,
    ranks: Callable[[], Iterable[psutil.Process]],
    otherwise: Callable[[int], None],
    grace_s: float | None,
    until: Callable[[], object] = lambda: None,
) -> int:
    """Waits for the command's own process and returns its exit code, 128 + n if signal n ended it.

    Signals follow the rules of `StopRequest`: those for the ranks go to `ranks()`, or to `otherwise` while there are
    none; SIGINT goes to the command's process group. As soon as `until` returns anything true, everything is killed.
    """
    stop = StopRequest(grace_s, INTERRUPT_S)
    sent: set[tuple[int, int]] = set()  # (process id, signal)

    def signal_ranks() -> bool:
        """Sends the newest signal to ranks that have not got it, such as those just started. False without ranks."""
        if stop.signal is None or stop.rank_signal is None:
            return False
        running = list(ranks())
        _send([rank for rank in running if (rank.pid, stop.signal) not in sent], stop.rank_signal)
        sent.update((rank.pid, stop.signal) for rank in running)
        return bool(running)

    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = tree.process.wait(TICK_S)
            break
        tree.reap_zombies()
        while (received := signals.take()) is not None:
            number, at = received
            match stop.note(number, at):
                case StopAction.KILL:
                    tree.kill()
                    return 128 + number
                case StopAction.FORWARD if number == signal.SIGINT:
                    tree.signal_group(number)
                case StopAction.FORWARD if not signal_ranks():
                    otherwise(number)
        signal_ranks()
        if until() or time.monotonic() > stop.deadline:
            tree.kill()
            return 128 + (signal.SIGINT if stop.was_interrupted else signal.SIGKILL)
    if stop.was_interrupted:
        return 128 + signal.SIGINT
    return 128 - code if code < 0 else code


def decode_launcher_exit_code(code: int) -> int:
    """Returns 128 + n if DeepSpeed's launcher reports that signal n ended a rank: it exits with -n, that is 256 - n."""
    return 384 - code if code > 256 - signal.NSIG else code


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
