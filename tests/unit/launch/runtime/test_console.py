"""A process whose console is lost goes on, keeps what it says, and ends with its own exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.errors import PREEMPTED_CODE
from tests.helpers.commands import ROOT

TALKS = """
import logging, os, sys, threading, traceback, warnings
from pathlib import Path
import launch.runtime.console as console
console.PATIENCE_S = 0.3
ours = console.keep_output_after_hangup()
ours.keep_in(Path(sys.argv[1]), when_alone=lambda: Path(sys.argv[2]).open("a").write("alone"))
logging.basicConfig(level="INFO", stream=sys.stdout)
sys.stdin.read(1)  # until the reader is what the test wants
"""
SAYS = """
for number in range(3):
    print(f"out {number}")
print("err", file=sys.stderr, flush=True)
logging.info("logged")
warnings.warn("warned")
sys.stdout.write("x" * 100_000 + "\\n")
sys.stdout.buffer.write(b"bytes\\n")
os.system("echo from another process")
try:
    raise ValueError("raised")
except ValueError:
    traceback.print_exc()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
print("no end of the line", end="")
sys.exit(75)
"""


def start(folder: Path, program: str, **options: Any) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", TALKS + program, str(folder / "kept"), str(folder / "alone")]
    return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, **options)


def go_on(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.close()
    return process.wait(timeout=30)


def kept(folder: Path) -> list[str]:
    return (folder / "kept").read_text().splitlines() if (folder / "kept").exists() else []


def test_a_reader_that_has_gone(tmp_path: Path) -> None:
    process = start(tmp_path, SAYS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert go_on(process) == PREEMPTED_CODE
    said = kept(tmp_path)
    for line in ("out 0", "out 2", "err", "INFO:root:logged", "bytes", "ValueError: raised", "no end of the line"):
        assert line in said, said
    assert "x" * 100_000 in said and any("warned" in line for line in said)
    assert any("ZeroDivisionError" in line for line in said), "of a thread"
    assert (tmp_path / "alone").read_text() == "alone", "it is told once"


def test_a_reader_that_reads(tmp_path: Path) -> None:
    process = start(tmp_path, SAYS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"x")
    process.stdin.close()
    said = process.stdout.read().decode().splitlines()
    assert process.wait(timeout=30) == PREEMPTED_CODE
    assert said[:3] == ["out 0", "out 1", "out 2"] and said[-1] == "no end of the line"
    assert said.index("err") < said.index("INFO:root:logged") < said.index("ValueError: raised")
    assert "bytes" in said and "from another process" in said
    assert kept(tmp_path) == [] and not (tmp_path / "alone").exists()


@pytest.mark.timeout(60)
def test_a_reader_that_does_not_read_for_a_while(tmp_path: Path) -> None:
    """ssh whose link is cut: the pipe fills, and would hold the process up for a quarter of an hour."""
    program = """
sys.stdout.write("first\\n" * 50_000)
print("nobody reads")
print("told", file=sys.stderr, flush=True)
sys.stdin.read(1)
print("back")
sys.exit(75)
"""
    process = start(tmp_path, program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    assert process.stderr.readline() == b"told\n", "it went on"
    lost = kept(tmp_path)
    assert lost[-1] == "nobody reads"
    os.set_blocking(process.stdout.fileno(), False)
    seen = process.stdout.read() or b""  # all that the pipe holds
    os.set_blocking(process.stdout.fileno(), True)
    process.stdin.write(b"x")
    process.stdin.close()
    assert process.stdout.read() == b"back\n"
    assert process.wait(timeout=30) == PREEMPTED_CODE
    assert seen + ("\n".join(lost[:-1]) + "\n").encode() == b"first\n" * 50_000, "each line is in one place"


@pytest.mark.timeout(60)
def test_a_terminal_that_nobody_reads(tmp_path: Path) -> None:
    """It takes less at once than it says, and a write to it would wait for ever."""
    ours, theirs = os.openpty()
    process = start(tmp_path, "for number in range(2000): print(f'line {number}')\nsys.exit(75)", stdout=theirs)
    assert go_on(process) == PREEMPTED_CODE
    os.close(ours)
    os.close(theirs)
    assert kept(tmp_path)[-1] == "line 1999"


def test_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        assert go_on(start(tmp_path, SAYS, stdout=full, stderr=full)) == PREEMPTED_CODE
    assert "out 0" in kept(tmp_path) and not (tmp_path / "alone").exists(), "somebody is still there"


@pytest.mark.parametrize("redirection", [">&- 2>&-", "> /dev/null 2>&-", ">&-"])
def test_no_console_at_all(tmp_path: Path, redirection: str) -> None:
    """The next file that is opened would get the descriptor that libraries write their messages to."""
    precious = f"""
file = open({str(tmp_path / "precious")!r}, "w")
file.write("checkpoint")
file.flush()
os.write(1, b"of a library")
os.write(2, b"of a library")
"""
    words = [sys.executable, "-c", TALKS + precious + SAYS, str(tmp_path / "kept"), str(tmp_path / "alone")]
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert go_on(process) == PREEMPTED_CODE
    assert (tmp_path / "precious").read_text() == "checkpoint"


def test_characters_that_the_console_does_not_know(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        'print("\\u2192")\nsys.exit(75)',
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert go_on(process) == PREEMPTED_CODE
    assert process.stdout is not None and process.stdout.read() == b"\\u2192\n"


def test_no_signal_comes_from_a_broken_pipe(tmp_path: Path) -> None:
    """C++ that writes into it gets an error instead."""
    program = "import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\nconsole.keep_output_after_hangup()\n"
    program += "print(open('/proc/self/status').read())\n"
    process = start(tmp_path, program, stdout=subprocess.PIPE, text=False)
    assert go_on(process) == 0
    assert process.stdout is not None
    (ignored,) = [line for line in process.stdout.read().decode().splitlines() if line.startswith("SigIgn:")]
    assert int(ignored.split()[1], 16) >> (signal.SIGPIPE - 1) & 1
