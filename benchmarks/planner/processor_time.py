"""Processor seconds of the planner's answers for Llama 3 70B on H100s, of this tree and of another.

    python -m benchmarks.planner.processor_time REVISION           # prints the table
    python -m benchmarks.planner.processor_time REVISION --write   # and writes benchmarks/results/planner_time.md

Whole commands, the start of Python included, with all threads, and with the byte code that an installed package has:
the first round, which may compile it, is not counted. Both trees answer in turns, so that what else the machine does
counts for both alike.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks import harness

ROOT, RESULTS = harness.ROOT, harness.RESULTS / "planner_time.md"
CONFIG = {
    "run_dir": "run",
    "model": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "data": {"path": "data"},
    "parallel": "auto",
    "training": {"global_batch_size": 1024, "sequence_length": 8192, "tokens": 15_000_000_000_000},
}
COMMANDS = {
    "`plan`, 1,024 H100": ["layouts", "--gpus", "1024"],
    "`plan reliability`, 256, 512 and 1,024": ["reliability", "--gpus", "256,512,1024"],
    "`plan simulate`, 1,024": ["simulate", "--gpus", "1024"],
}


def processor_s(tree: Path, words: Sequence[str], config: Path) -> float:
    """Returns the processor seconds of a command of a tree's own code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command, *options = words
    subprocess.run(
        [sys.executable, "-P", "-m", "launch", "plan", command, str(config), "--accelerator", "H100", *options],
        cwd=config.parent,
        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="revision to compare with, as in HEAD~1")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which both trees have their turn")
    parser.add_argument("--write", action="store_true", help="write the results file")
    options = parser.parse_args()
    taken: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in COMMANDS}
    load = harness.Load()
    with harness.tree_of(options.revision) as other, tempfile.TemporaryDirectory() as temporary:
        config = Path(temporary) / "config.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        for tree in (other, ROOT):
            processor_s(tree, COMMANDS[next(iter(COMMANDS))], config)
        for name in [name for name in COMMANDS for _ in range(options.rounds)]:
            for tree, seconds in zip((other, ROOT), taken[name], strict=True):
                seconds.append(processor_s(tree, COMMANDS[name], config))
    lines = harness.header("command", "CPU s before", "CPU s", "ratio")
    for name, pair in taken.items():
        before, now = (statistics.median(seconds) for seconds in pair)
        lines.append(harness.row((name, f"{before:.2f}", f"{now:.2f}", f"{now / before:.2f}")))
    command = f"benchmarks.planner.processor_time {options.revision} --rounds {options.rounds} --write"
    text = harness.page("Processor time of the planner", command, f"{harness.machine()}. {load} Medians.", *lines)
    harness.show(text, RESULTS, renews=options.write)


if __name__ == "__main__":
    main()
