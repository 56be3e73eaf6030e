"""Restarts a run that fails, which then resumes by itself: `megalite supervise` and `megalite train --restart`.

The supervisor keeps no state of the run: it reads from the run folder how far an attempt has come (run_progress.py).
Each attempt runs under a reaper of its own (reaper.py), so that nothing of it is left when it has ended, or when the
supervisor is killed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from launch.errors import (
    FAILED_CODE,
    HUNG_CODE,
    INTERRUPTED_CODE,
    PREEMPTED_CODE,
    STOPPED_CODE,
    USER_ERROR_CODE,
    LaunchError,
)
from launch.output import check_local
from launch.runtime.import_path import PYTHON_PATH, SAFE_PATH
from launch.runtime.logs import get_logger
from launch.runtime.processes import ProcessTree, StopRequest, StopSignals, wait_for
from launch.runtime.started_modules import REAPER, python_command
from launch.supervision.liveness import HeartbeatMonitor
from launch.supervision.run_progress import RunProgress, run_exit_code
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.safe_files import read_end
from megalite.config import Config
from megalite.distributed.rank_admission import ATTEMPT
from megalite.monitor.line_files import LineFile
from megalite.monitor.observer import Nonfatal
from megalite.monitor.progress import format_continuation

log = get_logger(__name__)

LOG = "supervisor.log"
ATTEMPTS = "attempts.jsonl"
STARTUP_FAILURES = 5  # in a row, after which a transient cause, such as a lock or unmounted storage, is unlikely
REAPER_S = 20.0  # for the reaper to end an attempt after the grace period, before it is killed itself
ANNOUNCEMENT = re.compile(r"restart \d+ of \d+ in ([\d.e+]+) s: ")
ANNOUNCED_BYTES = 1 << 16  # at the end of the log, with its last line
START_S = 120.0  # from a restart until the new ranks take the lock of the run's folder
MODULES = (
    "if the command did not find a module of yours: no code is loaded from the current folder or from that of a "
    f"script; put its folder on the path (export {PYTHON_PATH}=FOLDER), or leave this to Python ({SAFE_PATH}= megalite "
    "supervise ...)"
)
FINAL = {  # exit codes after which a restart would not help, or is not wanted
    0: "done",
    USER_ERROR_CODE: "a mistake",  # final for the first attempt only: later, what looks like a mistake may pass
    STOPPED_CODE: "a guard stopped the run",
    PREEMPTED_CODE: "asked to end, and saved",
    INTERRUPTED_CODE: "interrupted",
}


@dataclass(frozen=True)
class AttemptEnd:
    """Outcome of an attempt."""

    code: int  # of the command; 128 + n for signal n
    reason: str | None = None  # why the supervisor ended it, without a full stop; None: it ended by itself
    facts: dict[str, Any] = field(default_factory=dict)  # for the log of attempts
    is_final: bool = False  # another attempt would fail too


@dataclass(frozen=True)
class Policy:
    """Limits of restarting a failed run."""

    restarts: int = 5  # maximum over the whole run
    first_wait_s: float = 1.0  # before the first restart; doubled for each further one without a new checkpoint
    longest_wait_s: float = 300.0
    grace_s: float = 120.0  # from SIGTERM or SIGHUP until what still runs is killed; other signals set no limit
    heartbeat_timeout_s: float = 60.0  # without a heartbeat of a rank that has sent one; 0 disables the check


def config_of(command: Sequence[str]) -> Config:
    """Loads the config that `command` names: its first argument ending in .yaml, with the overrides that follow.

    Raises LaunchError if there is no such argument, ConfigError if the config is invalid.
    """
    for index, argument in enumerate(command):
        if argument.endswith((".yaml", ".yml")):
            following = command[index + 1 :]
            return load_run_config(Path(argument), [one for one in following if "=" in one and not one.startswith("-")])
    raise LaunchError(
        f'the command "{" ".join(command)}" names no config (a word that ends in .yaml), so the run\'s folder is not '
        "known: give it with --run-dir"
    )


def supervise_run(command: Sequence[str], policy: Policy, run_dir: Path | None = None) -> int:
    """Runs `command` until it succeeds or a restart would not help; returns the run's last exit code.

    Raises LaunchError or ConfigError if it cannot be supervised.
    """
    _check_command(command[0] if command else "")
    if run_dir is not None:
        check_local(run_dir, "give the local folder of the run with --run-dir")
        if run_dir.exists() and not run_dir.is_dir():
            raise LaunchError(f"--run-dir {run_dir} is a file: give the folder of the run")
        return CommandSupervisor(command, policy, run_dir, config=None).run()
    config = config_of(command)
    check_resumes(config)
    return CommandSupervisor(command, policy, config.run_dir, config).run()


def _check_command(program: str) -> None:
    """Raises LaunchError if `program` cannot be started."""
    if shutil.which(program) is not None:
        return
    if program.endswith((".yaml", ".yml")):
        raise LaunchError(f"{program} is a config, no program: megalite supervise -- megalite train {quote(program)}")
    if Path(program).is_file():
        raise LaunchError(f"the command {program!r} is not executable: chmod +x it, or name its interpreter first")
    raise LaunchError(f"the command {program!r} is not there: name a program after --")


def check_resumes(config: Config) -> None:
    """Raises LaunchError if a restarted run would begin from scratch."""
    if not config.checkpoint.resume:
        raise LaunchError("checkpoint.resume is false, so a run that is started again could not go on: set it true")


class Supervisor(ABC):
    """Repeats a run until an attempt succeeds or another would not help."""

    def __init__(self, policy: Policy, run_dir: Path, config: Config | None) -> None:
        """`config` tells how long the run is; None if it is not known."""
        self._policy, self._run_dir, self._length_of = policy, run_dir, config
        self._nonfatal = Nonfatal(log.warning)
        self._unreadable = ""  # why the folder was, as last told
        self._progress = self._read_progress() or RunProgress()  # when it could last be read
        self._last_trained: tuple[int | None, int] | None = None  # by the last attempt that did: checkpoint, step
        self._restarts = self._startup_failures = 0
        self._wait_s = policy.first_wait_s

    @abstractmethod
    def _attempt(self, signals: StopSignals) -> AttemptEnd:
        """Runs one attempt and leaves none of its processes behind."""

    def run(self) -> int:
        """Runs attempts; returns the last exit code of the run."""
        with StopSignals() as signals:
            while True:
                began = time.time()
                ended = self._attempt(signals)
                before, after = self._progress, self._read_progress()
                self._progress = after or before
                code = run_exit_code(before, after, ended.code, self._total_steps())
                if ended.reason is not None and code and signals.last is None:
                    # the supervisor ended the attempt, and ranks may have reported that as a preemption
                    self._log(ended.reason)
                    code = ended.code
                self._record(began, ended, code)
                if signals.last is not None:
                    self._log(f"asked to end by {signal.Signals(signals.last).name}: {self._ending(code)}")
                    return code
                if code in FINAL and not (code == USER_ERROR_CODE and self._restarts):
                    if code:
                        self._log(f"not started again: {self._ending(code)}")
                    return code
                reason = self._reason_to_give_up(before, after, ended)
                if reason:
                    self._log(f"gave up: {reason}: {self._ending(code)}")
                    return code
                if self._restarts and self._progress.checkpoint != before.checkpoint:
                    self._wait_s = self._policy.first_wait_s
                self._restarts += 1
                number = f"{self._restarts} of {self._policy.restarts}"
                progress = after or f"({self._run_dir} is unreadable)"
                self._log(f"restart {number} in {self._wait_s:.3g} s: {describe(code)} {progress}")
                if not sleep(self._wait_s, signals):
                    self._log(f"asked to end before restart {self._restarts}")
                    return 128 + (signals.last or signal.SIGTERM)
                self._wait_s = min(2 * self._wait_s, self._policy.longest_wait_s)

    def _read_progress(self) -> RunProgress | None:
        """Reads the run's folder; None if it is unreadable, which is logged once for each reason."""

        def report(reason: str) -> None:
            if reason != self._unreadable:
                self._unreadable = reason
                self._log(f"{self._run_dir} is unreadable, so the command's exit code alone counts: {reason}")

        return RunProgress.read(self._run_dir, report)

    def _ending(self, code: int) -> str:
        """Returns an exit code with its meaning, how far the run has come, and what starting it again does."""
        if code in (0, USER_ERROR_CODE) or not (self._progress.step or self._progress.checkpoint):
            return describe(code)
        return f"{describe(code)} {self._progress}; {format_continuation(self._progress.checkpoint)}"

    def _total_steps(self) -> int | None:
        """Returns the length of the run in steps, counted from its newest checkpoint; None if it is not known."""
        if self._length_of is None:
            return None
        return self._length_of.counted_from(self._progress.checkpoint or 0, self._progress.tokens_seen).total_steps

    def _reason_to_give_up(self, before: RunProgress, after: RunProgress | None, ended: AttemptEnd) -> str | None:
        """Returns why another attempt would not help; None if it may.

        A step that fails twice will fail again, but a host that is lost twice may not be; a start that fails may be
        transient a few times.
        """
        if ended.is_final:
            return "there is nothing to start it on"
        if after is not None and after.has_trained(before):
            self._startup_failures = 0
            if ended.reason is None and (after.checkpoint, after.step) == self._last_trained:
                return "it failed twice in a row without progress"
            self._last_trained = after.checkpoint, after.step
        else:
            self._startup_failures += 1
            if self._startup_failures >= STARTUP_FAILURES:
                unread = f" ({self._run_dir} is unreadable)" if after is None else ""
                return f"{self._startup_failures} attempts in a row failed before they had trained a step{unread}"
        if self._restarts >= self._policy.restarts:
            return f"all {self._restarts} restarts are used" if self._restarts else "no restart is allowed"
        return None

    def _record(self, began: float, ended: AttemptEnd, code: int) -> None:
        """Appends a line to the log of attempts."""
        if not self._run_dir.is_dir():
            return
        record = {
            "attempt": self._restarts + 1,
            "began": began,
            "ended": time.time(),
            "exit_code": code,
            "reason": ended.reason or describe(code),
            "step": self._progress.step,
            "checkpoint": self._progress.checkpoint,
            **ended.facts,
        }
        with self._nonfatal(str(self._run_dir / ATTEMPTS)):
            LineFile(self._run_dir / ATTEMPTS).append(json.dumps(record) + "\n")

    def _log(self, sentence: str, level: int = logging.WARNING) -> None:
        """Logs to the console and to a file in the run's folder."""
        with self._nonfatal("the console"):
            log.log(level, "%s", sentence)
        if self._run_dir.is_dir():
            with self._nonfatal(str(self._run_dir / LOG)):
                LineFile(self._run_dir / LOG).append(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {sentence}\n")


class CommandSupervisor(Supervisor):
    """Supervises a command on this host."""

    def __init__(self, command: Sequence[str], policy: Policy, run_dir: Path, config: Config | None) -> None:
        super().__init__(policy, run_dir, config)
        self._command = command

    def _attempt(self, signals: StopSignals) -> AttemptEnd:
        grace_s = self._policy.grace_s
        reaper = python_command(REAPER, str(grace_s), *self._command)
        attempt = uuid.uuid4().hex
        with (
            ProcessTree(reaper, os.environ | {ATTEMPT: attempt}) as tree,
            HeartbeatMonitor(self._run_dir, attempt, self._policy.heartbeat_timeout_s, tree.ranks) as heartbeats,
        ):
            code = wait_for(
                tree,
                signals,
                StopRequest(2 * grace_s + REAPER_S),
                ranks=lambda: (),
                otherwise=tree.signal_group,
                until=heartbeats.reason,
            )
            reason = heartbeats.reason()  # read before `end`, which stops heartbeats as well
            left = tree.end(grace_s)
        if left:
            self._log(f"ended {left} process{'es' * (left > 1)} that the run had left behind")
        is_own = list(self._command[1:2]) == ["-P"]  # as from `python_command`
        if code == FAILED_CODE and not self._restarts and os.environ.get(SAFE_PATH) and not is_own:
            before, after = self._progress, self._read_progress() or self._progress
            if not (after.has_new_session(before) or after.has_trained(before)):
                with self._nonfatal("the console"):
                    log.warning(MODULES)
        return AttemptEnd(code, reason)


def announced_restart(run_dir: Path) -> str:
    """Returns the sentence that announces a restart, if that is a supervisor's last word and not overdue; else ""."""
    try:
        last = read_end(run_dir / LOG, ANNOUNCED_BYTES).decode(errors="replace").splitlines()[-1]
        written, _, sentence = last.partition(" ")
        announced = ANNOUNCEMENT.match(sentence)
        if announced is None:
            return ""
        due = datetime.strptime(written, "%Y-%m-%dT%H:%M:%S%z").timestamp() + float(announced[1])
    except (OSError, ValueError, IndexError):
        return ""
    return sentence if time.time() < due + START_S else ""


def describe(code: int) -> str:
    """Returns an exit code with its meaning."""
    if code in FINAL:
        return f"exit code {code} ({FINAL[code]})"
    if code == HUNG_CODE:
        return f"exit code {code} (a rank died or hung, and the watchdog ended the run)"
    if 128 < code < 128 + signal.NSIG:
        try:
            return f"exit code {code} ({signal.Signals(code - 128).name})"
        except ValueError:  # a real-time signal
            pass
    return f"exit code {code}"


def sleep(seconds: float, signals: StopSignals) -> bool:
    """Sleeps until `seconds` are over or a stop signal arrives; returns False for the latter."""
    deadline = time.monotonic() + seconds
    while signals.last is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
    return signals.last is None
