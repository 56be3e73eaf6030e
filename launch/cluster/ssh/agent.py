"""Agent on each host of a run: answers requests, guards the ranks, and ends them. Its source is sent through ssh.

Standard library only, and no import of ours: the host may have another version of megalite, or none. Input: one JSON
object per line on stdin, `{"id", "confirmed", "action", "arguments"}`, where `confirmed` is the id of the newest answer
that the client has received. Output: lines `WORD {"id", "reply"}`, or `"error"` in place of `"reply"`. The client has
drawn the word at random, so that nothing that a host prints at login is taken for an answer.

Ranks are recognised by an environment variable that no other run has. While the agent guards them, a lease runs. If the
client confirms no answer for longer than the lease, this host is cut off and the ranks are killed. The lease counts
from when the confirmed answer was sent, so it ends here before the client may declare this host dead and start
replacements. If stdin is closed and no other agent takes over, the client is dead: the ranks get SIGTERM, so that they
save and end before the lease does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Action = Callable[..., "dict[str, Any]"]
MARK = "MEGALITE_ATTEMPT"
AGENT = "MEGALITE_AGENT"  # private variable: the process id of the agent that guards the ranks
POLL_KILLED_S = 0.05  # between two checks whether killed processes are gone
TICK_S = 0.2  # between two checks of the lease
SUCCESSOR_S = 5.0  # for another agent to take over after a lost connection
KILL_S = 20.0  # after this, the kernel cannot end a killed process
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # set by torchrun and deepspeed, MPI, srun
PRIVATE_FOLDER, PRIVATE_PREFIX = Path("/dev/shm"), "megalite_"  # of the files with private variables
PRIVATE_FILE = re.compile(rf"{PRIVATE_PREFIX}[0-9a-f]{{32}}\.(json|[a-z0-9_]{{8}})")  # of an attempt, also half written
LEFT_OVER_S = 600.0  # age from which such a file without an agent is removed; ranks that start may still read a newer
DEAD = "ZX"  # process states: zombie, and gone


def environment_of(process: int) -> dict[str, str]:
    """Returns the initial environment of a process; empty if it is not readable or the process is gone."""
    try:
        entries = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def status_of(process: int) -> tuple[str, int]:
    """Returns the state letter of a process as in proc(5), such as R, S, D or T, and its parent's id."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


def is_ours(process: int) -> bool:
    """Returns whether a process runs as this user alone; anybody can give a process of theirs our mark."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("Uid:"):  # real, effective, saved and file system's
                return {int(number) for number in line.split()[1:]} == {os.geteuid()}
    return False


def marked_environment(process: int, attempt: str) -> dict[str, str]:
    """Returns the environment of a process if it runs for an attempt, else nothing."""
    environment = environment_of(process)
    is_marked = environment.get(MARK) == attempt and is_ours(process) and status_of(process)[0] not in DEAD
    return environment if is_marked else {}


def processes_of(attempt: str) -> dict[int, dict[str, str]]:
    """Returns the running processes of an attempt, with their environments."""
    running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found = {process: marked_environment(process, attempt) for process in running}
    return {process: environment for process, environment in found.items() if environment}


def ranks_of(processes: dict[int, dict[str, str]]) -> dict[int, int]:
    """Maps the processes that a launcher started as ranks to their rank, without what ranks start themselves."""
    found: dict[int, int] = {}
    for process, variables in processes.items():
        numbers = [variables[name] for name in RANKS if variables.get(name, "").isdecimal()]
        if numbers:
            found[process] = int(numbers[0])
    return {process: rank for process, rank in found.items() if status_of(process)[1] not in found}


def send(attempt: str, processes: Iterable[int], number: int) -> None:
    """Sends a signal to all processes that still exist, and to none that has got the number of one of them since."""
    for process in processes:
        with contextlib.suppress(OSError):
            handle = handle_of(process)
            try:
                if not marked_environment(process, attempt):
                    continue
                if handle is None:
                    os.kill(process, number)
                else:
                    signal.pidfd_send_signal(handle, number)
            finally:
                if handle is not None:
                    os.close(handle)


def handle_of(process: int) -> int | None:
    """Returns a descriptor that means this process for ever; None where Linux or Python is too old for that.

    Raises ProcessLookupError if it has ended.
    """
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # a container may forbid it
        return None


def remove_left_over(folder: Path) -> None:
    """Removes this user's files with private variables whose agent was killed: nobody holds their lock."""
    for path in (path for path in folder.iterdir() if PRIVATE_FILE.fullmatch(path.name)):
        with contextlib.suppress(OSError):
            state = path.lstat()
            is_old = time.time() - state.st_mtime > LEFT_OVER_S
            if not (is_old and stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()):
                continue
            descriptor = os.open(str(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


class Agent:
    """Serves one connection and guards one attempt."""

    def __init__(self, actions: dict[str, Action], word: str) -> None:
        """`word` begins each answer."""
        self._word = word
        self._writing = threading.Lock()
        self._attempt, self._lease_s = "", float("inf")
        self._renewed, self._private = time.monotonic(), Path()
        self._lock: int | None = None  # an open descriptor of `_private`, which shows other agents that this one lives
        self._sent: dict[int, float] = {}  # answer id -> time.monotonic
        own: tuple[Action, ...] = (self.guard, self.ranks, self.signal, self.kill, self.release)
        self._actions: dict[str, Action] = {**actions, "ping": dict, **{action.__name__: action for action in own}}

    def guard(self, attempt: str, lease_s: float, private: dict[str, str]) -> dict[str, Any]:
        """Starts to guard an attempt.

        Its ranks read the variables in `private` from a file with mode 0600, so that they appear on no command line;
        the reply names the file.
        """
        self.release()
        remove_left_over(PRIVATE_FOLDER)
        path = PRIVATE_FOLDER / f"{PRIVATE_PREFIX}{attempt}.json"
        # of mode 0600, under a name that nobody can have taken before
        descriptor, new = tempfile.mkstemp(dir=str(PRIVATE_FOLDER), prefix=f"{PRIVATE_PREFIX}{attempt}.")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._lock = os.dup(descriptor)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({**private, AGENT: str(os.getpid())}, file)
            Path(new).replace(path)
        except OSError:
            Path(new).unlink()
            raise
        # last: an agent that refuses guards nothing, and its lease ends no rank
        self._renewed, self._attempt, self._lease_s, self._private = time.monotonic(), attempt, lease_s, path
        return {"private_environment": str(path)}

    def ranks(self) -> dict[str, Any]:
        """Returns rank, process id and state of each rank of the attempt here, and the number of its processes."""
        processes = processes_of(self._attempt)
        ranks = [
            {"rank": rank, "process": process, "state": status_of(process)[0]}
            for process, rank in ranks_of(processes).items()
        ]
        return {"ranks": sorted(ranks, key=lambda one: one["rank"]), "processes": len(processes)}

    def signal(self, number: int) -> dict[str, Any]:
        """Sends a signal to the ranks only, which save and end; their launcher would kill them."""
        ranks = ranks_of(processes_of(self._attempt))
        send(self._attempt, ranks, number)
        return {"ranks": sorted(ranks.values())}

    def kill(self) -> dict[str, Any]:
        """Kills all processes; returns how many there were and which the kernel could not end."""
        deadline = time.monotonic() + KILL_S
        seen: set[int] = set()
        while (left := processes_of(self._attempt)) and time.monotonic() < deadline:
            seen |= set(left)
            send(self._attempt, left, signal.SIGKILL)
            time.sleep(POLL_KILLED_S)
        return {"killed": len(seen), "left": sorted(left)}

    def release(self) -> dict[str, Any]:
        """Stops guarding the attempt."""
        if self._attempt and not self._is_relieved():
            with contextlib.suppress(FileNotFoundError):
                self._private.unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._attempt, self._lease_s = "", float("inf")
        return {}

    def watch(self) -> None:
        """Kills the ranks and exits once the lease is over. Runs in a thread."""
        while time.monotonic() - self._renewed < self._lease_s:
            time.sleep(TICK_S)
        if not self._is_relieved():
            self.kill()
        self._leave()

    def serve(self) -> None:
        """Answers requests until stdin is closed, and then waits until no rank is left."""
        with contextlib.suppress(Exception):  # a truncated request, or no thread for it, counts as a closed stdin
            for line in sys.stdin:
                request = json.loads(line)
                with self._writing:
                    self._renewed = max(self._renewed, self._sent.get(request["confirmed"], 0.0))
                    self._sent = {number: sent for number, sent in self._sent.items() if sent > self._renewed}
                threading.Thread(target=self._answer, args=(request,), daemon=True).start()
        if self._attempt:
            self._drain_ranks()
        self._leave()

    def _drain_ranks(self) -> None:
        """Lets the ranks save and end unless another agent takes over; the lease limits how long."""
        deadline = time.monotonic() + SUCCESSOR_S
        while time.monotonic() < deadline and not self._is_relieved():
            time.sleep(TICK_S)
        if not self._is_relieved():
            send(self._attempt, ranks_of(processes_of(self._attempt)), signal.SIGTERM)
            while processes_of(self._attempt):
                time.sleep(TICK_S)

    def _is_relieved(self) -> bool:
        """Returns whether another agent guards the attempt; False if that is unknown."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(json.loads(self._private.read_bytes())[AGENT] != str(os.getpid()))
        return False

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = {"id": request["id"], "reply": self._actions[request["action"]](**request["arguments"])}
        except Exception as error:
            answer = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        # the client may be gone, and stdin is closed then too
        with self._writing, contextlib.suppress(OSError):
            self._sent[request["id"]] = time.monotonic()
            print(f"{self._word} {json.dumps(answer)}", flush=True)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            self.release()
        os._exit(0)


def main(actions: dict[str, Action], word: str) -> None:
    """Runs an agent whose answers begin with `word`; never returns."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    agent = Agent(actions, word)
    threading.Thread(target=agent.watch, daemon=True).start()
    agent.serve()
