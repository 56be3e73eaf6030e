"""Running whole commands as a user would, and reading what they leave."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megalite.monitor.records.step import StepRecord

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(
    *words: str | Path, timeout_s: float = 280, cwd: Path = ROOT, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """A command to its end, on the CPU; a variable that is None is not set.

    It has one thread, as all tests (tests/conftest.py): a rank that is alone would have as many as there are cores,
    which spin (launch/runtime/local_ranks.py) on those that other tests want. One of 60 tiny steps took 52 s of them.
    """
    wanted = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **environment}
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={name: value for name, value in wanted.items() if value is not None},
        cwd=cwd,
    )


def metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of a run, whose fields are all known by name and stand in their order; not the one being written."""
    whole, _, _ = (Path(run_dir) / "metrics.jsonl").read_text().rpartition("\n")
    records = [json.loads(line) for line in whole.splitlines()]
    assert all([*one] == [name for name in StepRecord.__annotations__ if name in one] for one in records)
    return records


def whole_command() -> Any:
    """The `megalite` command with all commands inside it, each of which is otherwise imported when it runs."""
    from typer.main import get_command

    from launch.cli.app import app, load

    megalite: Any = get_command(app)
    megalite.commands = {name: load(name) for name in megalite.commands}
    return megalite


def command_line(
    *words: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A `megalite` command that starts no ranks, to its end in this process, where nothing has to be imported again.

    Only tests of what belongs to a process of its own, such as its signals and its start without torch, need `run`.
    """
    from launch.cli.app import main

    said, complained, code = io.StringIO(), io.StringIO(), 0
    umask = os.umask(0o022)
    os.umask(umask)
    with (
        chdir(cwd),
        redirect_stdout(said),
        redirect_stderr(complained),
        patch.dict(os.environ, env or {}),
        patch.multiple(sys, argv=["megalite", *words], excepthook=sys.excepthook),
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os.umask(umask)
    return subprocess.CompletedProcess(["megalite", *words], code, said.getvalue(), complained.getvalue())
