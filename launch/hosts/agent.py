"""What runs on each host of a run, sent there through ssh: answers questions, watches over the ranks, ends them.

Standard library only, and nothing of ours is imported: the host may have another version of megalite, or none.
In: one JSON object a line on stdin, `{"id", "confirmed", "action", "arguments"}`, where `confirmed` is the newest
answer that has arrived there. Out: `megalite {"id", "reply"}`, or `"error"`.

Ranks are known by a variable of their environment that no other run has. While it guards them, silence is an order. If
no answer is confirmed for longer than a lease, this host is cut off, and they are killed: the lease counts from when
that answer was sent, so it is over here before whoever got it may take this host for dead and start others in its
place. If stdin is closed and no other agent takes over, whoever started them is dead: they are asked to save and end
before the lease is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Action = Callable[..., "dict[str, Any]"]
MARK = "MEGALITE_ATTEMPT"
AGENT = "MEGALITE_AGENT"  # among the private variables: the process that guards their ranks
LOOK_S = 0.05  # between looks whether killed processes are gone
TICK_S = 0.2  # between looks whether the lease is over
SUCCESSOR_S = 5.0  # for another agent to take over where only the connection has ended
KILL_S = 20.0  # then a killed process is one that the kernel cannot end
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # of torchrun and deepspeed, and of MPI and srun
DEAD = "ZX"  # states of a process: not yet collected, and none


def environment_of(process: int) -> dict[str, str]:
    """As the process was started with; empty where it may not be seen, or is gone."""
    try:
        entries = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def status_of(process: int) -> tuple[str, int]:
    """The letter of its state in proc(5), R, S, D, T ..., and its parent."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return words[0], int(words[1])


def processes_of(attempt: str) -> dict[int, dict[str, str]]:
    """Those that belong to an attempt and live, with their environment."""
    there = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    marked = {process: environment_of(process) for process in there}
    return {
        process: environment
        for process, environment in marked.items()
        if environment.get(MARK) == attempt and status_of(process)[0] not in DEAD
    }


def ranks_of(processes: dict[int, dict[str, str]]) -> dict[int, int]:
    """Process -> rank of those that a launcher made ranks; not what ranks start themselves."""
    found: dict[int, int] = {}
    for process, variables in processes.items():
        numbers = [variables[name] for name in RANKS if variables.get(name, "").isdecimal()]
        if numbers:
            found[process] = int(numbers[0])
    return {process: rank for process, rank in found.items() if status_of(process)[1] not in found}


def send(processes: Iterable[int], number: int) -> None:
    """A signal to all that are still there."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


class Agent:
    """One connection and the attempt it guards."""

    def __init__(self, actions: dict[str, Action]) -> None:
        self._writing = threading.Lock()
        self._attempt, self._lease_s = "", float("inf")
        self._renewed, self._private = time.monotonic(), Path()
        self._sent: dict[int, float] = {}  # answer -> when
        own: dict[str, Action] = {
            "ping": dict,
            "guard": self.guard,
            "ranks": self.ranks,
            "signal": self.signal,
            "kill": self.kill,
            "release": self.release,
        }
        self._actions = {**actions, **own}

    def guard(self, attempt: str, lease_s: float, private: dict[str, str]) -> dict[str, Any]:
        """From now on watches over an attempt's processes. `private`: variables that its ranks read from a file which
        only this user can read, so that they are on no command line; the reply names it."""
        self.release()
        self._renewed = time.monotonic()
        self._attempt, self._lease_s = attempt, lease_s
        self._private = Path(f"/dev/shm/megalite_{attempt}.json")
        new = self._private.with_suffix(f".{os.getpid()}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump({**private, AGENT: str(os.getpid())}, file)
        new.replace(self._private)
        return {"private_environment": str(self._private)}

    def ranks(self) -> dict[str, Any]:
        """Rank, process and state of each rank of the attempt on this host, and how many processes it has in all."""
        processes = processes_of(self._attempt)
        ranks = [
            {"rank": rank, "process": process, "state": status_of(process)[0]}
            for process, rank in ranks_of(processes).items()
        ]
        return {"ranks": sorted(ranks, key=lambda one: one["rank"]), "processes": len(processes)}

    def signal(self, number: int) -> dict[str, Any]:
        """To the ranks alone: they save and end. Their launcher would end them."""
        ranks = ranks_of(processes_of(self._attempt))
        send(ranks, number)
        return {"ranks": sorted(ranks.values())}

    def kill(self) -> dict[str, Any]:
        """SIGKILL to all, until none is left; how many there were, and which the kernel could not end."""
        deadline = time.monotonic() + KILL_S
        seen: set[int] = set()
        while (left := processes_of(self._attempt)) and time.monotonic() < deadline:
            seen |= set(left)
            send(left, signal.SIGKILL)
            time.sleep(LOOK_S)
        return {"killed": len(seen), "left": sorted(left)}

    def release(self) -> dict[str, Any]:
        """Nothing is guarded any more."""
        if self._attempt and not self._is_relieved():
            self._private.unlink(missing_ok=True)
        self._attempt, self._lease_s = "", float("inf")
        return {}

    def watch(self) -> None:
        """The thread that notices that nobody gets the answers any more."""
        while time.monotonic() - self._renewed < self._lease_s:
            time.sleep(TICK_S)
        if not self._is_relieved():
            self.kill()
        self._leave()

    def hear(self) -> None:
        """Until stdin is closed, and then until no rank is left."""
        with contextlib.suppress(Exception):  # half an order, no thread for it: as if nothing came any more
            for line in sys.stdin:
                order = json.loads(line)
                with self._writing:
                    self._renewed = max(self._renewed, self._sent.get(order["confirmed"], 0.0))
                    self._sent = {number: sent for number, sent in self._sent.items() if sent > self._renewed}
                threading.Thread(target=self._answer, args=(order,), daemon=True).start()
        if self._attempt:
            self._take_leave()
        self._leave()

    def _take_leave(self) -> None:
        """Of the ranks, unless another agent guards them. The thread that watches ends it with the lease."""
        deadline = time.monotonic() + SUCCESSOR_S
        while time.monotonic() < deadline and not self._is_relieved():
            time.sleep(TICK_S)
        if not self._is_relieved():
            send(ranks_of(processes_of(self._attempt)), signal.SIGTERM)
            while processes_of(self._attempt):
                time.sleep(TICK_S)

    def _is_relieved(self) -> bool:
        """Whether another agent guards the attempt; not where nothing can be known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(json.loads(self._private.read_bytes())[AGENT] != str(os.getpid()))
        return False

    def _answer(self, order: dict[str, Any]) -> None:
        try:
            answer = {"id": order["id"], "reply": self._actions[order["action"]](**order["arguments"])}
        except Exception as error:
            answer = {"id": order["id"], "error": f"{type(error).__name__}: {error}"}
        # who asked may be gone, and stdin is closed then as well
        with self._writing, contextlib.suppress(OSError):
            self._sent[order["id"]] = time.monotonic()
            print(f"megalite {json.dumps(answer)}", flush=True)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            self.release()
        os._exit(0)


def main(actions: dict[str, Action]) -> None:
    """Never returns."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    agent = Agent(actions)
    threading.Thread(target=agent.watch, daemon=True).start()
    agent.hear()
