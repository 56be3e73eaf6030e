"""The process in which one part runs: `python -m benchmarks.gpu_day` starts it, and ends it at its limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.gpu_day.context import Context
from benchmarks.gpu_day.parts import find
from benchmarks.gpu_day.store import ResultStore


def main() -> int:
    """Runs the part that its argument describes."""
    task = json.loads(sys.argv[1])
    (part,) = find([task["part"]])
    store = ResultStore(Path(task["folder"]), task["key"])
    work = Path(task["work"]) / ("tiny" if task["tiny"] else "full")  # a small corpus is none for the large models
    work.mkdir(parents=True, exist_ok=True)
    record = store.begin(part.name, task["again"])
    context = Context(part.name, task["device"], task["tiny"], work, task["overrides"], store, record)
    part.load()(context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
