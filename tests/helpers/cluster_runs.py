"""Runs on hosts for tests: started by `megalite launch` on the head, hurt, and looked at from outside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalite.monitor.events import EVENTS, read_events
from tests.conftest import write_config
from tests.helpers.audit import steps_done
from tests.helpers.commands import BIN, ROOT
from tests.helpers.hosts import Cluster, HostedProcess
from tests.helpers.process_table import environment

PATIENCE_S = 150.0
MARK = "MEGALITE_ATTEMPT"


class Launched:
    """`megalite launch` on the head of a cluster."""

    def __init__(
        self, cluster: Cluster, folder: Path, config: dict[str, Any], hosts: str, *options: str, cwd: Path = ROOT
    ) -> None:
        self.cluster, self.folder, self.run_dir = cluster, folder, Path(config["run_dir"])
        folder.mkdir(exist_ok=True)
        (folder / "hosts").write_text(hosts)
        path = write_config(folder / "config.yaml", config)
        command = [BIN / "megalite", "launch", "--hostfile", str(folder / "hosts"), *options, str(path)]
        self._said = folder / "said"
        with self._said.open("w") as said:
            self.process = cluster.hosts["head"].popen(
                command,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            )

    def said(self) -> str:
        return self._said.read_text()

    def step(self) -> int:
        """The last one on record."""
        with contextlib.suppress(OSError, ValueError):
            return steps_done(self.run_dir)
        return 0

    def sessions(self) -> int:
        """How often its ranks have started."""
        if not (self.run_dir / EVENTS).exists():
            return 0
        return sum(event["event"] == "started" for event in read_events(self.run_dir / EVENTS))

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.said()}"
            assert time.monotonic() < deadline, f"takes too long\n{self.said()}"
            time.sleep(0.05)

    def wait_for_steps(self, more: int) -> None:
        """Until it trains, and has done so many more."""
        before = self.step()
        self.wait_until(lambda: self.step() >= before + more)

    def recovered(self, since: float) -> float:
        """Seconds from a fault (`time.time`) until its ranks, started again, have ended a step."""
        sessions = self.sessions()
        self.wait_until(lambda: self.sessions() > sessions)
        started = time.time()
        self.wait_until(lambda: any(record["time"] > started for record in self.newest()))
        return time.time() - since

    def newest(self) -> list[dict[str, Any]]:
        """The last record, where there is one."""
        with contextlib.suppress(OSError, ValueError):
            return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()[-1:]]
        return []

    def rank_processes(self) -> dict[int, HostedProcess]:
        """Rank -> its process."""
        found = {}
        for process in self.cluster.processes_with(MARK):
            rank = environment(process.pid).get("RANK", "")
            if rank.isdecimal() and "launch/train.py" in process.command:
                found[int(rank)] = process
        return found

    def command_lines_with(self, word: str) -> list[str]:
        """The command lines on all hosts that hold a word; every user of a host can read them."""
        found = []
        for pid in [pid for host in self.cluster.hosts.values() for pid in host.pids()]:
            with contextlib.suppress(OSError):
                found += [line for line in [Path(f"/proc/{pid}/cmdline").read_text()] if word in line]
        return found

    def send(self, number: int, rank: int) -> float:
        """A signal to a rank; when, by `time.time`."""
        now = time.time()
        os.kill(self.rank_processes()[rank].pid, number)
        return now

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code; nothing of it may be left anywhere."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"has not ended\n{self.said()}") from None
        self.cluster.assert_no_orphans(MARK, within_s=2)
        return code

    def attempts(self) -> list[dict[str, Any]]:
        """The log of them."""
        return [json.loads(line) for line in (self.run_dir / "attempts.jsonl").read_text().splitlines()]


def is_running(cluster: Cluster, host: str, name: str) -> list[int]:
    """Processes of that name on a host."""
    return [pid for pid in cluster.hosts[host].pids() if _name(pid) == name]


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
