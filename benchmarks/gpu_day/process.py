"""A command with a time limit, whose every descendant ends with it, and which is never silent for long.

Linux, standard library. Descendants are found by a mark in their environment: ranks have process groups and sessions
of their own, and some are handed to another parent.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MARK = "MEGALITE_GPU_DAY_PROCESS"
SILENT_S = 9.0  # before a line that says so
SILENT_INSIDE_S = 7.0  # of what runs inside a part, so that one of them speaks
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """The exit of a command."""

    code: int | None  # None: it was stopped at its limit
    seconds: float
    output: str  # the last lines of both streams


def run(
    command: Sequence[str],
    limit_s: float | None,
    say: Say,
    name: str,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    kept_lines: int = 200,
    result: Path | None = None,
) -> Ended:
    """Runs a command to its end or its limit, its lines to `say` as they come. Nothing it has started outlives it.

    `result` is a file for what it prints, where that is for a program; then its stderr alone is told.
    """
    mark, started = uuid.uuid4().hex, time.monotonic()
    marks = ":".join([*os.environ.get(MARK, "").split(":"), mark])  # it ends with whatever has started this process
    values = {**(os.environ if environment is None else environment), MARK: marks, "PYTHONUNBUFFERED": "1"}
    with result.open("wb") if result is not None else nullcontext(subprocess.STDOUT) as target:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if result is None else target,
            stderr=subprocess.STDOUT if result is None else subprocess.PIPE,
            env=values,
            cwd=folder,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    lines: list[str] = []
    try:
        is_over = _listen(process, started, limit_s, say, name, lines, kept_lines)
    finally:
        end_all(mark)
        process.kill()
        process.wait()
    seconds = time.monotonic() - started
    return Ended(None if is_over else process.returncode, seconds, "\n".join(lines))


def _listen(
    process: subprocess.Popen[str],
    started: float,
    limit_s: float | None,
    say: Say,
    name: str,
    lines: list[str],
    kept: int,
) -> bool:
    """Until the command ends, False, or its time is up, True."""
    heard: queue.Queue[str] = queue.Queue()
    stream = process.stderr or process.stdout
    assert stream is not None
    threading.Thread(target=_read, args=(stream, heard), daemon=True).start()
    spoke, since_last_write_s = time.monotonic(), SILENT_INSIDE_S if limit_s is None else SILENT_S
    limit = "" if limit_s is None else f" of at most {limit_s:.0f}"
    while limit_s is None or time.monotonic() - started < limit_s:
        now = time.monotonic()
        with suppress(queue.Empty):
            line = heard.get(timeout=0.2)
            lines.append(line)
            del lines[:-kept]
            say(line)
            spoke = now
            continue
        if process.poll() is not None:
            return False  # who still holds its output is about to be ended
        if now - spoke > since_last_write_s:
            say(f"{name}: {now - started:.0f} s{limit}")
            spoke = now
    return True


def _read(stream: IO[str], heard: queue.Queue[str]) -> None:
    with suppress(ValueError, OSError):  # closed meanwhile
        for line in stream:
            heard.put(line.rstrip("\n"))


def end_all(mark: str) -> None:
    """Kills every process with this mark, until there is none: one may start another before it is killed."""
    for _ in range(50):
        found = _marked(mark)
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    """Running ones; a zombie has no environment left."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def print_line(line: str) -> None:
    """Prints a line and flushes it."""
    print(line, flush=True)
