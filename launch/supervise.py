"""`megalite supervise` and `megalite train --restart`: a run that fails is started again and resumes by itself.

The supervisor holds no state of the run: how an attempt went it reads from the run folder (launch/outcome.py). Each
attempt runs under a keeper of its own (launch/keep.py), so that nothing of it is left when it has ended, or when the
supervisor is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.errors import (
    HUNG_CODE,
    INTERRUPTED_CODE,
    PREEMPTED_CODE,
    STOPPED_CODE,
    USER_ERROR_CODE,
    LaunchError,
)
from launch.outcome import RunFolder, code_of_run
from launch.processes import ProcessTree, StopSignals, wait_for
from launch.run_config import load_run_config
from launch.silence import ATTEMPT, Watcher
from megalite.config import Config
from megalite.monitor.json_lines import append_line
from megalite.resilience.nonfatal import Nonfatal

LOG = "supervisor.log"
ATTEMPTS = "attempts.jsonl"
STARTUP_FAILURES = 5  # in a row: what passes by itself, such as a lock or storage that is not there yet, has passed
KEEPER_S = 20.0  # what its keeper has to end an attempt after the grace period, before it is killed itself
FINAL = {  # starting again would not help, or is not wanted
    0: "done",
    USER_ERROR_CODE: "a mistake",  # of the first attempt: once a run has started, what looks like one may pass
    STOPPED_CODE: "a guard stopped the run",
    PREEMPTED_CODE: "asked to end, and saved",
    INTERRUPTED_CODE: "interrupted",
}


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

    code: int  # of the command; 128 + n for signal n
    reason: str | None = None  # why the supervisor ended it, a sentence without its full stop; None: it ended by itself
    facts: dict[str, Any] = field(default_factory=dict)  # for the log of attempts
    is_final: bool = False  # another attempt would not do better


@dataclass(frozen=True)
class Policy:
    """When a failed run is started again."""

    restarts: int = 5  # at most, over the whole run
    first_wait_s: float = 1.0  # before the first restart; doubled for each further one without a new checkpoint
    longest_wait_s: float = 300.0
    grace_s: float = 120.0  # from SIGTERM or SIGHUP until what still lives is killed; SIGUSR1 and SIGUSR2 set no limit
    silence_s: float = 60.0  # that a rank which was heard may say nothing; 0: nobody listens


def config_of(command: Sequence[str]) -> Config:
    """The config that `command` names: its first word that ends in .yaml, and the section.option=value words behind it.

    Raises LaunchError where it names none, ConfigError where it is not one.
    """
    for index, word in enumerate(command):
        if word.endswith((".yaml", ".yml")):
            behind = command[index + 1 :]
            return load_run_config(Path(word), [w for w in behind if "=" in w and not w.startswith("-")])
    raise LaunchError(
        f'the command "{" ".join(command)}" names no config (a word that ends in .yaml), so the run\'s folder is not '
        "known: give it with --run-dir"
    )


def supervise_run(command: Sequence[str], policy: Policy, run_dir: Path | None = None) -> int:
    """Runs `command` until it ends well, or until starting it again is of no use; the run's last exit code.

    Raises LaunchError or ConfigError, one sentence, where it cannot be supervised.
    """
    if not command or shutil.which(command[0]) is None:
        raise LaunchError(f"the command {command[0] if command else ''!r} is not there: name a program after --")
    if run_dir is not None:
        return CommandSupervisor(command, policy, run_dir, total_steps=None).run()
    config = config_of(command)
    check_resumes(config)
    return CommandSupervisor(command, policy, config.run_dir, config.total_steps).run()


def check_resumes(config: Config) -> None:
    """Raises LaunchError where a run that is started again would begin anew."""
    if not config.checkpoint.resume:
        raise LaunchError("checkpoint.resume is false, so a run that is started again could not go on: set it true")


class Supervisor(ABC):
    """Makes attempts until one ends well, or another is of no use."""

    def __init__(self, policy: Policy, run_dir: Path, total_steps: int | None) -> None:
        self._policy, self._run_dir, self._total_steps = policy, run_dir, total_steps
        self._nonfatal = Nonfatal(lambda sentence: print(f"megalite: {sentence}", file=sys.stderr, flush=True))
        self._folder = RunFolder.read(run_dir) or RunFolder()  # as it was when it could last be read
        self._trained: RunFolder | None = None  # after the last attempt that trained and failed
        self._restarts = self._startup_failures = 0
        self._wait_s = policy.first_wait_s

    @abstractmethod
    def _attempt(self, signals: StopSignals) -> Ended:
        """Runs it once. Nothing of it is left then."""

    def run(self) -> int:
        """The run's last exit code."""
        with StopSignals() as signals:
            while True:
                began = time.time()
                ended = self._attempt(signals)
                before, after = self._folder, RunFolder.read(self._run_dir)
                self._folder = after or before
                code = code_of_run(before, after, ended.code, self._total_steps)
                if (
                    ended.reason is not None and code and signals.last is None
                ):  # ranks may have taken it for somebody's wish
                    self._say(ended.reason)
                    code = ended.code
                self._log(began, ended, code)
                if signals.last is not None:
                    self._say(f"asked to end by {signal.Signals(signals.last).name}: {describe(code)}")
                    return code
                if code in FINAL and not (code == USER_ERROR_CODE and self._restarts):
                    if code:
                        self._say(f"not started again: {describe(code)}")
                    return code
                reason = self._reason_to_give_up(before, after, ended)
                if reason:
                    self._say(f"gave up: {reason}: {describe(code)}")
                    return code
                if self._restarts and self._folder.checkpoint != before.checkpoint:
                    self._wait_s = self._policy.first_wait_s
                self._restarts += 1
                number, where = (
                    f"{self._restarts} of {self._policy.restarts}",
                    after or f"({self._run_dir} is unreadable)",
                )
                self._say(f"restart {number} in {self._wait_s:.3g} s: {describe(code)} {where}")
                if not sleep(self._wait_s, signals):
                    self._say(f"asked to end before restart {self._restarts}")
                    return 128 + (signals.last or signal.SIGTERM)
                self._wait_s = min(2 * self._wait_s, self._policy.longest_wait_s)

    def _reason_to_give_up(self, before: RunFolder, after: RunFolder | None, ended: Ended) -> str | None:
        """A step that fails again is no bad luck, but a host that is lost again is; a start that fails may be, for a
        while."""
        if ended.is_final:
            return "there is nothing to start it on"
        if after is not None and after.has_trained(before):
            self._startup_failures = 0
            if ended.reason is None and after.is_where(self._trained):
                return f"it failed twice in a row {after}, without progress"
            self._trained = after
        else:
            self._startup_failures += 1
            if self._startup_failures >= STARTUP_FAILURES:
                unread = f" ({self._run_dir} is unreadable)" if after is None else ""
                return f"{self._startup_failures} attempts in a row failed before they had trained a step{unread}"
        if self._restarts >= self._policy.restarts:
            return f"all {self._restarts} restarts are used" if self._restarts else "no restart is allowed"
        return None

    def _log(self, began: float, ended: Ended, code: int) -> None:
        """One line in the log of attempts."""
        if not self._run_dir.is_dir():
            return
        record = {
            "attempt": self._restarts + 1,
            "began": began,
            "ended": time.time(),
            "exit_code": code,
            "reason": ended.reason or describe(code),
            "step": self._folder.step,
            "checkpoint": self._folder.checkpoint,
            **ended.facts,
        }
        with self._nonfatal(str(self._run_dir / ATTEMPTS)):
            append_line(self._run_dir / ATTEMPTS, json.dumps(record) + "\n")

    def _say(self, sentence: str) -> None:
        with self._nonfatal("the console"):
            print(f"megalite: {sentence}", file=sys.stderr, flush=True)
        if self._run_dir.is_dir():
            with self._nonfatal(str(self._run_dir / LOG)), (self._run_dir / LOG).open("a") as log:
                log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {sentence}\n")


class CommandSupervisor(Supervisor):
    """Of any command on this host."""

    def __init__(self, command: Sequence[str], policy: Policy, run_dir: Path, total_steps: int | None) -> None:
        super().__init__(policy, run_dir, total_steps)
        self._command = command

    def _attempt(self, signals: StopSignals) -> Ended:
        grace_s = self._policy.grace_s
        keeper = [sys.executable, "-m", "launch.keep", str(grace_s), *self._command]
        attempt = uuid.uuid4().hex
        with (
            ProcessTree(keeper, os.environ | {ATTEMPT: attempt}) as tree,
            Watcher(self._run_dir, attempt, self._policy.silence_s, tree.ranks) as watcher,
        ):
            code = wait_for(
                tree,
                signals,
                ranks=lambda: (),
                otherwise=tree.signal_group,
                grace_s=2 * grace_s + KEEPER_S,
                until=watcher.reason,
            )
            reason = watcher.reason()  # what is left now is silent because it is being ended
            left = tree.end(grace_s)
        if left:
            self._say(f"ended {left} process{'es' * (left > 1)} that the run had left behind")
        return Ended(code, reason)


def describe(code: int) -> str:
    """An exit code and what it means."""
    if code in FINAL:
        return f"exit code {code} ({FINAL[code]})"
    if code == HUNG_CODE:
        return f"exit code {code} (the watchdog ended a run that hung)"
    if 128 < code < 128 + signal.NSIG:
        try:
            return f"exit code {code} ({signal.Signals(code - 128).name})"
        except ValueError:  # a real-time signal
            pass
    return f"exit code {code}"


def sleep(seconds: float, signals: StopSignals) -> bool:
    """Less where somebody asks to end. Whether nobody did."""
    deadline = time.monotonic() + seconds
    while signals.last is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
    return signals.last is None
