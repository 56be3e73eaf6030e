"""Runs what a stranger has written, a chat template or the rules of a tokenizer, in a process with limits.

It may run without end or fill the memory, and a thread that does so cannot be stopped. One forked process answers any
number of requests, one after another: a line of JSON asks, a line answers. Its limits are for each of them.
"""

import gc
import json
import os
import resource
import select
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil

REASON_CHARACTERS = 300
_PATIENCE = 6  # times the limit on the processor's time, for a process that does not get a processor
_CHUNK_BYTES = 1 << 16


class ProcessRefusal(Exception):
    """Raised for a request that ends in an error. The text is a clause that says why."""


class ProcessLimit(ProcessRefusal):
    """Raised for a process that ran too long, took too much memory, or broke."""


class LimitedProcess:
    """A forked process that answers requests; it ends with this object.

    `begin` runs in it first and returns the function that answers. What either raises is told in place of an answer:
    errors of the kind `passed_on` are raised here again with their text.
    """

    def __init__(
        self, begin: Callable[[], Callable[[Any], Any]], memory_bytes: int, passed_on: type[Exception]
    ) -> None:
        request_reader, self._requests = os.pipe()
        self._answers, answer_writer = os.pipe()
        self._passed_on = passed_on
        self._process = os.fork()
        if self._process == 0:
            try:
                _serve(begin, memory_bytes, passed_on, request_reader, answer_writer)
            finally:
                os._exit(0)
        os.close(request_reader)
        os.close(answer_writer)
        self._status: list[int] = []
        pipes = (self._requests, self._answers)
        self._owner = os.getpid()
        # ends the process, at the latest with this object
        self.end = weakref.finalize(self, _end_process, self._owner, self._process, pipes, self._status)

    @property
    def has_ended(self) -> bool:
        """True once it has been ended, as after a limit, and in a fork of its owner: the next request needs another."""
        return not self.end.alive or os.getpid() != self._owner

    def ask(self, request: Any, processor_s: float) -> Any:
        """Returns the answer to a request. Raises ProcessRefusal, or ProcessLimit when the process has been ended."""
        answer = self._answer(json.dumps([processor_s, request]).encode() + b"\n", processor_s)
        if answer is None:
            self.end()
            (status,) = self._status
            broke = os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGPROF, signal.SIGKILL)
            raise ProcessLimit("its process broke" if broke else f"it did not end within {processor_s:g} s")
        made, kind, refusal = json.loads(answer)
        if kind:
            raise {"passed on": self._passed_on, "limit": ProcessLimit}.get(kind, ProcessRefusal)(refusal)
        return made

    def _answer(self, request: bytes, processor_s: float) -> bytes | None:
        """Returns the answer as it comes; None if the process ended instead, or takes too long."""
        deadline = time.monotonic() + _PATIENCE * processor_s
        try:
            while request:
                request = request[os.write(self._requests, request) :]
        except BrokenPipeError:
            return None
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._answers, _CHUNK_BYTES) if ready else b""
            if not part:
                return None
            parts.append(part)
        return b"".join(parts)


def _end_process(owner: int, process: int, pipes: tuple[int, int], status: list[int]) -> None:
    if os.getpid() != owner:
        return
    for pipe in pipes:
        os.close(pipe)
    os.kill(process, signal.SIGKILL)
    status.append(os.waitpid(process, 0)[1])


def _serve(
    begin: Callable[[], Callable[[Any], Any]],
    memory_bytes: int,
    passed_on: type[Exception],
    requests: int,
    answers: int,
) -> None:
    """Answers requests until there are no more; runs in the forked process."""
    os.dup2(requests, 0)
    os.dup2(answers, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print their own words and traces there
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the parent's lock and pipes must not outlive it
    gc.freeze()  # what came with the fork stays in memory that is shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it the requests
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + memory_bytes)  # counts what is mapped already
    answer: Callable[[Any], Any] | None = None
    with os.fdopen(0, "rb") as lines:
        for line in lines:
            kind, made, refusal = "", None, ""
            try:
                processor_s, request = json.loads(line)
                signal.setitimer(signal.ITIMER_PROF, processor_s)  # of the processor; its signal ends the process
                answer = answer or begin()
                made = answer(request)
            except MemoryError:
                kind, refusal = "limit", f"it takes more than {memory_bytes >> 30} GiB of memory"
            except BaseException as error:  # it is a program that may raise anything
                kind = "passed on" if isinstance(error, passed_on) else "refusal"
                refusal = " ".join(str(error).split()) or type(error).__name__
                refusal = refusal if kind == "passed on" else refusal[:REASON_CHARACTERS]
            text = json.dumps([made, kind, refusal]).encode() + b"\n"
            signal.setitimer(signal.ITIMER_PROF, 0)
            while text:
                text = text[os.write(1, text) :]


def _limit(of: int, most: int) -> None:
    hard = resource.getrlimit(of)[1]
    resource.setrlimit(of, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
