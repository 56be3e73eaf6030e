"""A command and all processes that it starts: what signals do to them, how they end, and that none is left. Linux only.

Asked to end once, ranks finish their step, save, and end by themselves. Asked again, or by Ctrl-C, all ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
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
MARK = "MEGALITE_TREES"  # in the environment of a tree's processes: the trees that they belong to, outermost first
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TICK_S = 0.1
REPEAT_S = 2.0  # Slurm signals each process of a job: the same signal comes directly and by way of a supervisor
INTERRUPT_S = 10.0  # what Ctrl-C leaves for clean-up
LINGER_S = 1.0  # what helpers of a process have to end by themselves after it has
KILL_S = 30.0  # then a killed process is one that the kernel cannot end, such as one that hangs in a file system


def end_with_parent(parent: int | None = None) -> None:
    """In a child, before it does anything: Linux sends it SIGTERM when its parent dies, even of SIGKILL.

    `parent` is the parent's process id; without it, a parent that has died already is not noticed.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


class StopSignals:
    """While open, notes the signals that ask to end instead of dying of them. Main thread only."""

    def __init__(self) -> None:
        self.last: int | None = None  # the newest, taken or not
        self._noted: deque[tuple[int, float]] = deque()
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup means that SIGHUP is to be ignored
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.last = number
        self._noted.append((number, time.monotonic()))

    def take(self) -> tuple[int, float] | None:
        """The oldest one not taken yet, and when it came (`time.monotonic`)."""
        return self._noted.popleft() if self._noted else None


class ProcessTree:
    """A command in a session of its own. What it leaves behind when its own process ends is adopted by this process,
    and at the end of the `with` block nothing of it lives any more. If this process is killed, it gets SIGTERM.

    This process may adopt others as well, as the first one of a container does: of these it only collects those that
    have ended.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, is_alone: bool = False) -> None:
        """`is_alone`: this process is there for the tree only, so whatever it adopts is of the tree."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._is_alone, self._mark = is_alone, uuid.uuid4().hex
        self.process = subprocess.Popen(
            command,
            env={**environment, MARK: f"{environment.get(MARK, '')}:{self._mark}"},
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def members(self) -> list[psutil.Process]:
        """All its processes that live, orphans among them."""
        family: list[psutil.Process] = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if self._holds(child):
                    family += [child, *child.children(recursive=True)]
        return [process for process in family if _lives(process)]

    def _holds(self, child: psutil.Process) -> bool:
        """Whether a child of this process is, or was adopted, of the tree: its session or its environment proves it."""
        if self._is_alone or os.getsid(child.pid) == self.process.pid:
            return True
        return self._mark in child.environ().get(MARK, "").split(":")

    def ranks(self) -> list[psutil.Process]:
        """Those that deepspeed's or torchrun's launcher made ranks; not what ranks start themselves."""
        inside: dict[int, psutil.Process] = {}
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= process.environ().keys():
                    inside[process.pid] = process
        return [process for process in inside.values() if _parent(process) not in inside]

    def children(self) -> list[psutil.Process]:
        """Processes that the command's own process has started and that live."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in psutil.Process(self.process.pid).children() if _lives(child)]
        return []

    def signal_group(self, number: int) -> None:
        """To the command's process and those that share its process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def end(self, grace_s: float) -> int:
        """After the command's own process has ended: what is left gets SIGTERM, and SIGKILL `grace_s` later. How many
        processes were left."""
        self._wait_until_gone(LINGER_S)
        left = self.members()
        _send(left, signal.SIGTERM)
        if left:
            self._wait_until_gone(grace_s)
        self.kill()
        return len(left)

    def kill(self) -> None:
        """SIGKILL to every process, and to those that they start meanwhile, until none is left."""
        deadline = time.monotonic() + KILL_S
        while (living := self.members()) and time.monotonic() < deadline:
            _send(living, signal.SIGKILL)
            time.sleep(0.01)
        if self.process.poll() is None and not living:
            self.process.wait()
        self.bury()

    def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.members() and time.monotonic() < deadline:
            time.sleep(min(TICK_S, seconds / 10))

    def bury(self) -> None:
        """Collects adopted processes that have ended, so that they do not pile up; never the command's own."""
        with contextlib.suppress(ChildProcessError):  # there is no child at all
            looks = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while (dead := os.waitid(os.P_ALL, 0, looks)) is not None and dead.si_pid != self.process.pid:
                os.waitpid(dead.si_pid, 0)


class _Stop:
    """How far a process tree has been asked to end."""

    def __init__(
        self,
        tree: ProcessTree,
        ranks: Callable[[], Iterable[psutil.Process]],
        otherwise: Callable[[int], None],
        grace_s: float | None,
    ) -> None:
        self._tree, self._ranks, self._otherwise, self._grace_s = tree, ranks, otherwise, grace_s
        self._noted_at: dict[int, float] = {}  # by signal
        self._told: set[int] = set()  # process ids
        self._passed_on: int | None = None
        self.deadline: float | None = None
        self.was_interrupted = False

    def note(self, number: int, now: float) -> bool:
        """Takes a signal that came `now`. Whether all is to end now, because it was asked a second time."""
        first = self._noted_at.get(number)
        if first is not None:
            return now - first > REPEAT_S and number not in (signal.SIGUSR1, signal.SIGUSR2)
        self._noted_at[number] = now
        if number == signal.SIGINT:
            self.was_interrupted = True
            self.deadline = now + INTERRUPT_S
            self._tree.signal_group(number)
        else:
            self._passed_on = number
            self._told.clear()
            # who sends SIGUSR1 or SIGUSR2 early enough for a save has a limit of his own
            if self.deadline is None and self._grace_s is not None and number in (signal.SIGTERM, signal.SIGHUP):
                self.deadline = now + self._grace_s
            if not self.tell():
                self._otherwise(number)
        return False

    def tell(self) -> bool:
        """Passes the last signal on to the ranks that have not got it, because they have just been started. Whether
        there are ranks."""
        if self._passed_on is None:
            return False
        there = list(self._ranks())
        # of a terminal that is closed, ranks know nothing
        number = signal.SIGTERM if self._passed_on == signal.SIGHUP else self._passed_on
        _send([rank for rank in there if rank.pid not in self._told], number)
        self._told |= {rank.pid for rank in there}
        return bool(there)


def wait_for(
    tree: ProcessTree,
    signals: StopSignals,
    *,
    ranks: Callable[[], Iterable[psutil.Process]],
    otherwise: Callable[[int], None],
    grace_s: float | None,
    until: Callable[[], object] = lambda: None,
) -> int:
    """Waits for the command's own process; its exit code, 128 + n where signal n ended it.

    SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP go to `ranks()`, or, while there are none, to `otherwise`; `grace_s` after a
    SIGTERM or SIGHUP all that lives is killed. SIGINT goes to the command's group, with INTERRUPT_S until all is
    killed. A SIGTERM, SIGINT or SIGHUP that is repeated kills all now, and so does the first thing that `until` has to
    tell.
    """
    stop = _Stop(tree, ranks, otherwise, grace_s)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = tree.process.wait(TICK_S)
            break
        tree.bury()
        while (noted := signals.take()) is not None:
            if stop.note(*noted):
                tree.kill()
                return 128 + noted[0]
        stop.tell()
        if until() or (stop.deadline is not None and time.monotonic() > stop.deadline):
            tree.kill()
            return 128 + (signal.SIGINT if stop.was_interrupted else signal.SIGKILL)
    if stop.was_interrupted:
        return 128 + signal.SIGINT
    return 128 - code if code < 0 else code


def told_by_launcher(code: int) -> int:
    """128 + n where DeepSpeed's launcher says that signal n ended a rank: it ends with -n, which wraps to 256 - n."""
    return 384 - code if code > 256 - signal.NSIG else code


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None
