"""Running whole commands as a user would, and reading what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(
    *words: str | Path, timeout_s: float = 280, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command to its end, on the CPU."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"DS_ACCELERATOR": "cpu"}
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=env | environment,
        cwd=cwd,
    )


def metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
