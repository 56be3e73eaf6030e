"""`megalite supervise` and `megalite train --restart`: a run that fails is started again and resumes by itself.

The supervisor holds no state of the run: what it knows of progress it reads from the run folder. Each attempt runs
under a keeper of its own (launch/keep.py), so that nothing of it is left when it has ended, or when the supervisor is
killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.errors import (
    HUNG_CODE,
    INTERRUPTED_CODE,
    PREEMPTED_CODE,
    STOPPED_CODE,
    USER_ERROR_CODE,
    LaunchError,
)
from launch.processes import ProcessTree, StopSignals, wait_for
from megalite.checkpoint.manifest import find_latest, read_manifest
from megalite.config import Config, load_config
from megalite.monitor.sinks.jsonl import read_records
from megalite.resilience.nonfatal import Nonfatal

LOG = "supervisor.log"
KEEPER_S = 20.0  # what its keeper has to end an attempt after the grace period, before it is killed itself
FINAL = {  # starting again would not help, or is not wanted
    0: "done",
    USER_ERROR_CODE: "a mistake that starting again does not mend",
    STOPPED_CODE: "a guard stopped the run",
    PREEMPTED_CODE: "asked to end, and saved",
    INTERRUPTED_CODE: "interrupted",
}


@dataclass(frozen=True)
class Policy:
    """When a failed run is started again."""

    restarts: int = 5  # at most, over the whole run
    first_wait_s: float = 1.0  # before the first restart; doubled for each further one without a new checkpoint
    longest_wait_s: float = 300.0
    grace_s: float = 120.0  # from a request to end until what still lives is killed


@dataclass(frozen=True)
class Progress:
    """How far a run has come, by what its folder holds."""

    checkpoint: int | None  # step of the newest complete one
    step: int  # the last one logged; 0: none

    @classmethod
    def of(cls, run_dir: Path) -> Progress:
        """Nothing where the folder cannot be read."""
        try:
            newest, _ = find_latest(run_dir)
            records = read_records(run_dir / "metrics.jsonl")
            return cls(read_manifest(newest).step if newest else None, int(records[-1]["step"]) if records else 0)
        except (OSError, ValueError, KeyError, TypeError):
            return cls(None, 0)

    def __str__(self) -> str:
        step = f"after step {self.step}" if self.step else "before its first step ended"
        held = f"newest checkpoint: step {self.checkpoint}" if self.checkpoint is not None else "no checkpoint yet"
        return f"{step}; {held}"


def config_of(command: Sequence[str]) -> Config:
    """The config that `command` names: its first word that ends in .yaml, and the section.option=value words behind it.

    Raises LaunchError where it names none, ConfigError where it is not one.
    """
    for index, word in enumerate(command):
        if word.endswith((".yaml", ".yml")):
            behind = command[index + 1 :]
            return load_config(Path(word), [w for w in behind if "=" in w and not w.startswith("-")])
    raise LaunchError(
        f'the command "{" ".join(command)}" names no config (a word that ends in .yaml), so the run\'s folder is not '
        "known: give it with --run-dir"
    )


def supervise_run(command: Sequence[str], policy: Policy, run_dir: Path | None = None) -> int:
    """Runs `command` until it ends well, or until starting it again is of no use; its last exit code.

    Raises LaunchError or ConfigError, one sentence, where it cannot be supervised.
    """
    if not command or shutil.which(command[0]) is None:
        raise LaunchError(f"the command {command[0] if command else ''!r} is not there: name a program after --")
    if run_dir is None:
        config = config_of(command)
        if not config.checkpoint.resume:
            raise LaunchError("checkpoint.resume is false, so a run that is started again could not go on: set it true")
        run_dir = config.run_dir
    return _Supervisor(command, policy, run_dir).run()


class _Supervisor:
    def __init__(self, command: Sequence[str], policy: Policy, run_dir: Path) -> None:
        self._command, self._policy, self._run_dir = command, policy, run_dir
        self._nonfatal = Nonfatal(lambda sentence: print(f"megalite: {sentence}", file=sys.stderr, flush=True))
        self._restarts = 0

    def run(self) -> int:
        failed_at: Progress | None = None
        wait_s = self._policy.first_wait_s
        with StopSignals() as signals:
            while True:
                code = self._attempt(signals)
                if signals.last is not None:
                    self._say(f"asked to end by {signal.Signals(signals.last).name}: {describe(code)}")
                    return code
                if code in FINAL:
                    if code:
                        self._say(f"not started again: {describe(code)}")
                    return code
                progress = Progress.of(self._run_dir)
                reason = self._reason_to_give_up(failed_at, progress)
                if reason:
                    self._say(f"gave up: {reason}: {describe(code)}")
                    return code
                if failed_at is not None and progress.checkpoint != failed_at.checkpoint:
                    wait_s = self._policy.first_wait_s
                self._restarts += 1
                number = f"{self._restarts} of {self._policy.restarts}"
                self._say(f"restart {number} in {wait_s:.3g} s: {describe(code)} {progress}")
                if not _sleep(wait_s, signals):
                    self._say(f"asked to end before restart {self._restarts}")
                    return 128 + (signals.last or signal.SIGTERM)
                failed_at, wait_s = progress, min(2 * wait_s, self._policy.longest_wait_s)

    def _attempt(self, signals: StopSignals) -> int:
        grace_s = self._policy.grace_s
        keeper = [sys.executable, "-m", "launch.keep", str(grace_s), *self._command]
        with ProcessTree(keeper, os.environ) as tree:
            code = wait_for(
                tree, signals, ranks=lambda: (), otherwise=tree.signal_group, grace_s=2 * grace_s + KEEPER_S
            )
            left = tree.end(grace_s)
        if left:
            self._say(f"ended {left} process{'es' * (left > 1)} that the run had left behind")
        return code

    def _reason_to_give_up(self, failed_at: Progress | None, progress: Progress) -> str | None:
        if progress == failed_at:
            return f"it failed twice in a row {progress}, without progress"
        if self._restarts >= self._policy.restarts:
            return f"all {self._restarts} restarts are used" if self._restarts else "no restart is allowed"
        return None

    def _say(self, sentence: str) -> None:
        with self._nonfatal("the console"):
            print(f"megalite: {sentence}", file=sys.stderr, flush=True)
        if self._run_dir.is_dir():
            with self._nonfatal(str(self._run_dir / LOG)), (self._run_dir / LOG).open("a") as log:
                log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {sentence}\n")


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


def _sleep(seconds: float, signals: StopSignals) -> bool:
    """Whether nobody asked to end meanwhile."""
    deadline = time.monotonic() + seconds
    while signals.last is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
    return signals.last is None
