"""Processor and wall seconds from `megalite train CONFIG` to the end of the first step, of this tree and of another.

    python -m benchmarks.startup REVISION           # prints the table
    python -m benchmarks.startup REVISION --write   # and writes benchmarks/results/startup.md

Shape: Llama, hidden 64, 2 layers, vocab 512, a step of 4 sequences of 64 tokens, fp32, one rank on the CPU: almost all
is start-up. Both trees start in turns, the one or the other first by turns, and a round before the first fills the
caches of files and of this machine's measurement. Parts are those of benchmarks/traced_start.py: the command's, up to
where it starts the rank, and the rank's. Processor time is that of all threads of the process, without its children;
the wall time of everything also has what lies between the two processes. `first run` is a start for which the machine
has not been measured yet, once a round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks import harness
from benchmarks.traced_start import MARKS

ROOT, RESULTS = harness.ROOT, harness.RESULTS / "startup.md"
TRACE = ROOT / "benchmarks" / "traced_start.py"
LEAST_PAIRS = 4  # of which quartiles are told
EVERYTHING, FIRST_RUN = "everything", "everything, first run"
MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Seconds(NamedTuple):
    """Seconds of one part of a start."""

    cpu: float
    wall: float


Start = dict[str, Seconds]  # by part, in their order


def write_config(folder: Path) -> Path:
    """Prepares the data of the run; returns its config."""
    text = shutil.copy(ROOT / "README.md", folder / "text.txt")
    words = ["prepare", str(text), "--train-vocab-size", "512", "-t", f"{folder}/tokenizer", "-o"]
    subprocess.run([sys.executable, "-m", "launch", *words, f"{folder}/data"], check=True, capture_output=True)
    training = {"global_batch_size": 4, "micro_batch_size": 4, "sequence_length": 64, "steps": 2}
    config = {
        "run_dir": f"{folder}/run",
        "model": MODEL,
        "data": {"path": f"{folder}/data"},
        "precision": {"dtype": "fp32"},
        "training": training,
        "monitor": {"plot": False, "report": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(tree: Path, folder: Path, config: Path, cache: Path) -> Start:
    """Runs the command of a tree; returns the seconds of each part of its start."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    ours = {"PYTHONPATH": f"{tree}:{folder}", "XDG_CACHE_HOME": str(cache), MARKS: str(marks), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-P", "-m", "traced_start", "train", str(config)]
    done = subprocess.run(command, cwd=folder, env=os.environ | ours, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: the run ended with {done.returncode}:\n{done.stderr}")
    found: Start = {}
    processes = [json.loads(line) for line in marks.read_text().splitlines()]
    for process in processes:
        cpu, at = 0.0, process["began"]
        for part, cpu_then, then in process["marks"]:
            found[f"{process['process']}: {part}"] = Seconds(cpu_then - cpu, then - at)
            cpu, at = cpu_then, then
    wall = processes[-1]["marks"][-1][2] - processes[0]["began"]
    return found | {EVERYTHING: Seconds(sum(part.cpu for part in found.values()), wall)}


def measure(trees: Sequence[Path], folder: Path, rounds: int) -> tuple[list[Start], list[Start]]:
    """Starts both trees in turns; returns the starts of each."""
    shutil.copy(TRACE, folder)
    config = write_config(folder)
    taken: tuple[list[Start], list[Start]] = ([], [])
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            found = start(trees[which], folder, config, folder / "known")
            unknown = folder / "unknown"
            shutil.rmtree(unknown, ignore_errors=True)
            found[FIRST_RUN] = start(trees[which], folder, config, unknown)[EVERYTHING]
            if number:
                taken[which].append(found)
                print(f"round {number}, {trees[which].name}: {found[EVERYTHING]}", file=sys.stderr, flush=True)
    return taken


def rows(other: list[Start], mine: list[Start], is_quiet: bool) -> list[str]:
    """The table's rows: medians of the parts, and for everything the ratios of the pairs."""
    lines = []
    for part in dict.fromkeys([*other[0], *mine[0]]):
        cells = [part]
        for kind in ("cpu", "wall"):
            if kind == "wall" and not is_quiet:
                cells += ["-", "-", "-"]
                continue
            pair = [[getattr(found[part], kind) for found in side if part in found] for side in (other, mine)]
            cells += [f"{statistics.median(side):.2f}" if side else "-" for side in pair]
            ratios = [now / then for then, now in zip(*pair, strict=False)]
            is_told = part in (EVERYTHING, FIRST_RUN) and len(ratios) >= LEAST_PAIRS
            cells.append(harness.quartiles(ratios) if is_told else "")
        lines.append(harness.row(cells))
    return lines


def report(table: Sequence[str], options: argparse.Namespace, load: harness.Load) -> str:
    """The results file, up to what is written by hand below it."""
    times = ("CPU s before", "CPU s", "ratio (quartiles)", "wall s before", "wall s", "ratio (quartiles)")
    return harness.page(
        "From the command to the first step",
        f"benchmarks.startup {options.revision} --rounds {options.rounds} --write",
        f"{harness.machine('torch', 'deepspeed')}. {load} Above the number of cores wall times say nothing and are "
        "left out.",
        *harness.header("part", *times),
        *table,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD", help="revision to compare with, as in HEAD~1")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which both trees have their turn")
    parser.add_argument("--write", action="store_true", help="write the results file")
    options = parser.parse_args()
    load = harness.Load()
    with harness.tree_of(options.revision) as other, tempfile.TemporaryDirectory() as temporary:
        taken = measure((other, ROOT), Path(temporary), options.rounds)
    is_quiet = max(load.before, os.getloadavg()[0]) <= (os.cpu_count() or 1)
    harness.show(report(rows(*taken, is_quiet), options, load), RESULTS, renews=options.write)


if __name__ == "__main__":
    main()
