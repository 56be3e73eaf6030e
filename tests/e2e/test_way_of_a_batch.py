"""The files that one optimizer step enters: few enough to read (docs/limits.md), and listed in docs/design.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.runtime.local_ranks import free_port
from tests.conftest import write_config
from tests.helpers.commands import ROOT
from tests.helpers.house import limits

pytestmark = pytest.mark.slow

# What watches a step, decides about it or logs it, without touching the batch.
OBSERVERS = (
    "launch/prediction/",  # the measurement beside the prediction
    "launch/runtime/console.py",
    "launch/runtime/startup_progress.py",
    "launch/trainer/prediction_tracker.py",
    "launch/trainer/run_logger.py",
    "megalite/checkpoint/",
    "megalite/units.py",  # the words of log lines
    "megalite/tracing/activity.py",  # records for the watchdog
    "megalite/tracing/tape.py",  # keeps them
    "megalite/monitor/steps/communication_meter.py",
    "megalite/monitor/",
    "megalite/resilience/",
    "megalite/training/checkpoints.py",
)

# Profiles step 3 in the thread that trains, and all of the thread that prepares batches, which works ahead.
PROFILED_RANK = """
import json, os, sys, threading
from pathlib import Path
from launch.train import main
from launch.trainer.data import opening
from megalite.tracing.activity import Activity

opening.notices_of_targets = lambda *arguments: ()  # what it looks at would lie in the caches of so small a run

root, entered, prepared, lines = f"{Path.cwd()}/", {}, {}, {}

def name_of(code):
    name = code.co_filename.removeprefix(root) if "/.venv/" not in code.co_filename else code.co_filename
    last = max(line or 0 for _, _, line in code.co_lines())
    if code.co_name != "<module>":
        lines.setdefault(name, set()).update(range(code.co_firstlineno, last + 1))
    return name

def note(frame, event, argument):
    if event == "call":
        in_batches = threading.current_thread() is not threading.main_thread()
        (prepared if in_batches else entered)[name_of(frame.f_code)] = None

def note_batches(frame, event, argument):
    if threading.current_thread().name.startswith("batches"):
        note(frame, event, argument)

def begin_phase(self, phase, step=None):
    if step == 3:
        frame, stack = sys._getframe(1), []
        while frame is not None:
            stack.insert(0, name_of(frame.f_code))
            frame = frame.f_back
        entered.update(dict.fromkeys(stack))
        sys.setprofile(note)
    if step == 4:
        sys.setprofile(None)
    original(self, phase, step)

original, Activity.begin_phase = Activity.begin_phase, begin_phase
threading.setprofile(note_batches)
code = main(sys.argv[2:])
files = [*entered]
first = files.index("data_pipeline/loader.py")
files[first:first] = prepared
names = [name for name in dict.fromkeys(files) if Path(name).is_file() and not name.startswith("/")]
Path(sys.argv[1]).write_text(json.dumps({name: len(lines.get(name, ())) for name in names}))
os._exit(code)
"""


def entered_in_one_step(config: dict[str, Any], folder: Path) -> dict[str, int]:
    """The project's files that step 3 of a run on one rank enters, in this order, from the entry point on, with the
    number of lines of the functions that it enters there."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", PROFILED_RANK, str(folder / "files"), str(write_config(folder / "c.yaml", config))],
        cwd=ROOT,
        env=os.environ
        | rank
        | {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads((folder / "files").read_text()))


def listed_in_design() -> list[str]:
    """The files in the table of docs/design.md, in its order."""
    section = (ROOT / "docs/design.md").read_text().partition("## The way of a batch")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


def test_one_step_enters_few_files_and_design_lists_them(tiny: dict[str, Any], tmp_path: Path) -> None:
    """A reader who follows a batch opens these files and no others; a new layer of calls shows up here."""
    entered = entered_in_one_step(tiny, tmp_path)
    observers = [name for name in entered if name.startswith(OBSERVERS)]
    path = [name for name in entered if name not in observers]
    reached = {
        "files": len(path),
        "lines": sum(len((ROOT / name).read_text().splitlines()) for name in path),
        "lines of functions": sum(entered[name] for name in path),
    }
    print(f"on the path: {reached}; {len(observers)} files of observers")
    assert listed_in_design() == path
    above = {name: count for name, count in reached.items() if count > limits()[f"a batch's way, {name}"]}
    assert not above, (above, path)
    assert "megalite/training/loop.py" in path and "megalite/monitor/goodput.py" in observers
