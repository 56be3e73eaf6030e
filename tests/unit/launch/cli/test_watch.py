"""`megalite watch` as a user starts and ends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from unittest.mock import patch

import pytest

from launch.cli.app import main
from tests.helpers.commands import BIN
from tests.helpers.process_table import listening


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has ended after one step."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": time.time(), "loss": 3.5}) + "\n")
    events = [{"time": time.time() - 1, "event": "started", "step": 0}, {"time": time.time(), "event": "ended"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def command(*words: object) -> int:
    with patch.object(sys, "argv", ["megalite", "watch", *map(str, words)]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_it_serves_this_machine_alone_until_ctrl_c(run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    watching = subprocess.Popen(
        [BIN / "megalite", "watch", run_dir], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert watching.stdout is not None
        address, tunnel = watching.stdout.readline().strip(), watching.stdout.readline()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=[\w-]{20,}", address)
        assert found, address
        assert f"ssh -N -L {found[1]}:127.0.0.1:{found[1]} " in tunnel
        assert listening(watching.pid) == {"127.0.0.1"}
        with urllib.request.urlopen(address, timeout=60) as page:
            assert b"<!DOCTYPE html>" in page.read() and "connect-src 'self'" in page.headers["Content-Security-Policy"]
        watching.send_signal(signal.SIGINT)
        rest, errors = watching.communicate(timeout=60)
    finally:
        watching.kill()
    assert watching.returncode == 0 and errors == "" and "Traceback" not in rest
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before, "it reads, and writes nothing"


def test_in_a_pipe_the_terminal_view_is_plain_lines_and_ends(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run_dir, "--terminal") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "ended: step 1" in line and "loss 3.5" in line and "\x1b" not in line


def test_another_address_is_warned_of(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.inspection.watching.server import RunServer

    def interrupt(self: RunServer, poll_interval: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunServer, "serve_forever", interrupt)
    assert command(run_dir, "--host", "0.0.0.0") == 0
    told = capsys.readouterr()
    assert "can be reached from other machines" in told.err and "ssh" not in told.out
    assert told.out.startswith(f"http://{socket.gethostname()}:"), "0.0.0.0 is no address to go to"
    assert command(run_dir) == 0
    assert "can be reached" not in capsys.readouterr().err


def test_mistakes_are_one_sentence(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for words, told in (
            ([tmp_path / "none"], "does not exist"),
            ([tmp_path], "is no folder of a run"),
            ([run_dir, "--port", taken.getsockname()[1]], "nothing can listen on 127.0.0.1, port"),
            ([run_dir, "--host", "192.0.2.1"], "nothing can listen on 192.0.2.1"),
            ([run_dir, "--port", "70000"], "--port must be at most 65535"),
        ):
            assert command(*words) == 2
            said = capsys.readouterr().err
            assert told in said and len(said.strip().splitlines()) == 1, said


def test_a_folder_that_goes_away_ends_the_terminal_view(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.inspection.watching import terminal

    (run_dir / "events.jsonl").write_text(json.dumps({"time": time.time(), "event": "started", "step": 0}) + "\n")
    (run_dir / ".lock").write_text(
        json.dumps({"host": socket.gethostname(), "process": os.getpid(), "time": time.time()})
    )
    monkeypatch.setattr(terminal.time, "sleep", lambda _: shutil.rmtree(run_dir))
    assert command(run_dir, "--terminal") == 2
    assert "cannot be watched any more: its folder is gone" in capsys.readouterr().err
