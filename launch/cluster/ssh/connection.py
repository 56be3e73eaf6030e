"""Connections to hosts: one ssh process each, which stays open and runs the agent (agent.py) on the host.

The source of the agent and of the host probe is sent through ssh, so a host only needs Python at the same path as here.
Login messages of hosts are ignored. When this process dies, stdin of each ssh is closed, and with it that of its agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any, TypeVar

from launch.errors import LaunchError
from launch.runtime.started_modules import AGENT, GPU_PROBE, HOST_PROBE

PROGRAM = (HOST_PROBE, GPU_PROBE, AGENT)
LOADER = (  # executes all sources in one namespace
    "import json, sys; own = dict(__name__='agent'); "
    "[exec(text, own) for text in json.loads(sys.stdin.buffer.read({}))]"
)
PATIENCE_S = 30.0
CONNECT_S = 5  # for the network; the key exchange of ssh takes additional time
MAX_THREADS = 64
LINE_BYTES = 1 << 20  # of the longest answer
STDERR_BYTES = 1 << 24  # that ssh may write into our temporary file before it is ended
REASON_BYTES, REASON_CHARACTERS = 1 << 14, 300  # at the end of that file, where ssh says why it failed
Result = TypeVar("Result")
REMEDIES = {  # part of the error message of ssh -> remedy
    "permission denied": "set up a key that works without a password (ssh-copy-id {name})",
    "host key verification failed": "connect once by hand (ssh {name}), so that its key becomes known",
    "could not resolve": "correct its name in the hostfile, or add it to DNS, /etc/hosts or ~/.ssh/config",
    "connection refused": "start sshd there, or name its port with --ssh-port",
    "timed out": "look whether it is up and the network reaches it",
    "no route to host": "look whether it is up and the network reaches it",
    "not found": "install megalite there at the same path as here, or put both on shared storage",
    "no such file": "install megalite there at the same path as here, or put both on shared storage",
}


class HostError(LaunchError):
    """A host cannot be reached or does not do what was asked; the message is one sentence."""


class Refused(HostError):
    """A host has answered that it cannot do what it was asked."""


class HostConnection:
    """Connection to an agent on a host. Thread-safe."""

    def __init__(self, name: str, *, ssh_port: int | None = None, patience_s: float = PATIENCE_S) -> None:
        """Connects; `patience_s` is how long a link may be interrupted.

        Raises HostError if the host, or Python on it, cannot be reached.
        """
        self.name = name
        self.heard = time.monotonic()  # time of the last answer
        self.is_open = True  # False once ssh, or the agent, has ended
        self._word = secrets.token_hex(16)
        program = json.dumps(
            [*(path.read_text() for path in PROGRAM), f"main({{**ACTIONS, **GPU_ACTIONS}}, {self._word!r})"]
        ).encode()
        loader = LOADER.format(len(program))
        remote = f"exec {shlex.quote(sys.executable)} -I -u -c {shlex.quote(loader)}"
        options = [f"-o{option}" for option in (*keep_alive(patience_s), f"ConnectTimeout={CONNECT_S}")]
        port = ["-p", str(ssh_port)] if ssh_port is not None else []
        try:
            self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - of ssh, and of Python there
            self._process = subprocess.Popen(
                ["ssh", *options, "-T", *port, name, remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C must not reach ssh
            )
        except OSError as error:  # no ssh, too many open files
            raise HostError(f"host {name} cannot be reached: {error.filename or 'ssh'}: {error.strerror}") from None
        with contextlib.suppress(OSError):  # it has ended already
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (STDERR_BYTES, STDERR_BYTES))
        self._asked, self._confirmed = 0, -1  # number of requests; the newest that was answered
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name=f"answers of {name}", daemon=True).start()
        try:
            self._send(program)
            self.ask("ping")
        except HostError:
            self.close()
            raise

    def ask(self, action: str, *, timeout_s: float = 10.0, **arguments: object) -> dict[str, Any]:
        """Sends a request and returns the reply. Raises HostError if none comes in `timeout_s`, or Refused."""
        answers = queue.SimpleQueue[dict[str, Any] | None]()
        with self._lock:
            if not self.is_open:
                raise self._lost()
            number, self._asked = self._asked, self._asked + 1
            self._waiting[number] = answers
        try:
            request = {"id": number, "confirmed": self._confirmed, "action": action, "arguments": arguments}
            self._send(json.dumps(request).encode() + b"\n")
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise HostError(
                f"host {self.name} has not answered for {timeout_s:g} s: look whether the network still reaches it"
            ) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if answer is None:
            raise self._lost()
        if "error" in answer:
            raise Refused(f"host {self.name} cannot do what it was asked ({action}): {answer['error']}")
        reply: dict[str, Any] = answer["reply"]
        return reply

    def close(self) -> None:
        """Closes the connection; the agent then ends the ranks that it still guards, and itself."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(data)
                self._process.stdin.flush()
        except (OSError, ValueError):  # ValueError: stdin is closed
            raise self._lost() from None

    def _read(self) -> None:
        """Passes answers to the threads that wait for them. Runs in a thread."""
        assert self._process.stdout is not None
        try:
            for line in short_lines(self._process.stdout):
                answer = answer_in(line, self._word)
                if answer is None or answer["id"] >= self._asked:
                    continue
                self.heard, self._confirmed = time.monotonic(), answer["id"]
                with self._lock:
                    waiting = self._waiting.pop(answer["id"], None)  # an answer that comes twice counts once
                if waiting is not None:
                    waiting.put(answer)
        finally:
            with self._lock:
                self.is_open = False
                for waiting in self._waiting.values():
                    waiting.put(None)

    def _lost(self) -> HostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - REASON_BYTES))
        lines = [line.strip() for line in self._stderr.read().splitlines() if line.strip()]
        reason = lines[-1][-REASON_CHARACTERS:] if lines else "the connection was closed"
        remedies = (remedy for message, remedy in REMEDIES.items() if message in reason.lower())
        remedy = next(remedies, "try `ssh {name}` by hand").format(name=self.name)
        return HostError(f"host {self.name} cannot be reached ({reason}): {remedy}")


def short_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a stream; passes over those that are longer than LINE_BYTES, or not ended."""
    is_cut = False
    while part := stream.readline(LINE_BYTES):
        has_end = part.endswith(b"\n")
        if has_end and not is_cut:
            yield part
        is_cut = not has_end


def answer_in(line: bytes, word: str) -> dict[str, Any] | None:
    """Returns the answer of an agent that follows `word` in a line; None if there is none, or not one as agents write.

    Hosts print messages at login, also without an end of line, and a host may be hostile.
    """
    _, found, text = line.partition(word.encode())
    if not found:
        return None
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or type(answer.get("id")) is not int or answer["id"] < 0:
        return None
    is_sound = isinstance(answer.get("reply"), dict) if "error" not in answer else isinstance(answer["error"], str)
    return answer if is_sound else None


def keep_alive(patience_s: float) -> list[str]:
    """Returns ssh options to never prompt, and to give up a host that is silent for longer than `patience_s`."""
    return ["BatchMode=yes", "ServerAliveInterval=5", f"ServerAliveCountMax={int(patience_s / 5) + 2}"]


def connect_all(
    names: Sequence[str], *, ssh_port: int | None = None, patience_s: float = PATIENCE_S
) -> tuple[dict[str, HostConnection], dict[str, HostError]]:
    """Connects to all hosts in parallel; returns the connections, and the errors of hosts that cannot be reached."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # three files per host
    return in_parallel(names, partial(HostConnection, ssh_port=ssh_port, patience_s=patience_s))


def in_parallel(names: Iterable[str], work: Callable[[str], Result]) -> tuple[dict[str, Result], dict[str, HostError]]:
    """Runs `work(name)` for all names in parallel; returns the results, and the HostErrors of those that failed."""
    done: dict[str, Result] = {}
    failed: dict[str, HostError] = {}

    with ThreadPoolExecutor(MAX_THREADS) as pool:
        for name, future in [(name, pool.submit(work, name)) for name in names]:
            try:
                done[name] = future.result()
            except HostError as error:
                failed[name] = error
    return done, failed
