"""Proves that a change of the code's structure changes no number: this tree against another revision, bit for bit.

    python -m benchmarks.same_losses REVISION [--whole] [--keep FOLDER]

Both trees train the quickstart's model on three layouts from the same seed and data; with `--whole` also under every
other schedule, on ZeRO-2, and on a mix of sources with stages. Losses, gradient norms and the digests of every
checkpointed weight and optimizer block must be equal, `megalite config show` must print the same, and this tree must
resume the checkpoint that the other tree wrote. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, tree_of

CONFIG = "configs/quickstart.yaml"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp2 pp2 dp2": (),
    "zero-3 dp2": (
        "parallel.tensor_parallel_size=1",
        "parallel.pipeline_parallel_size=1",
        "parallel.zero_stage=3",
        "recompute.mode=full",
    ),
    "serial bf16": (
        "parallel.tensor_parallel_size=1",
        "parallel.pipeline_parallel_size=1",
        "parallel.data_parallel_size=1",
        "precision.dtype=bf16",
        "optimizer.name=sgd",
    ),
}
MORE: dict[str, tuple[str, ...]] = {
    **{
        f"tp2 pp2 dp2, {schedule}": (f"parallel.pipeline_schedule={schedule}", "training.micro_batch_size=1")
        for schedule in ("interleaved", "zero-bubble", "zb-v", "dualpipev")
    },
    "zero-2 dp2": ("parallel.tensor_parallel_size=1", "parallel.pipeline_parallel_size=1", "parallel.zero_stage=2"),
    "pp2 of a mix": (
        "parallel.tensor_parallel_size=1",
        "data.path=null",
        "data.sources={one: {path: DATA, weight: 0.7}, two: {path: DATA, weight: 0.3}}",
        "data.stages=[{from_steps: 3, weights: {two: 6}}]",
    ),
}
STEPS = 8
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "evaluation_loss", "samples", "tokens_seen")


def megalite(tree: Path, *arguments: str) -> str:
    """Standard output of a command of `tree`'s own code. Raises where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{tree.name}: megalite {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def train(tree: Path, run_dir: Path, data: Path, steps: int, options: tuple[str, ...]) -> None:
    """Trains to step `steps` in `run_dir`; resumes what is there."""
    megalite(
        tree,
        "train",
        CONFIG,
        f"run_dir={run_dir}",
        f"data.path={data}",
        f"training.steps={steps}",
        "training.evaluation.interval=4",
        "schedule.name=constant",
        *(option.replace("DATA", str(data)) for option in options),
    )


def records(run_dir: Path) -> list[dict[str, object]]:
    """The deterministic columns of metrics.jsonl, one record a step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: record.get(key) for key in COMPARED} for record in map(json.loads, lines)]


def digests(run_dir: Path) -> dict[str, object]:
    """SHA-256 of each file with tensors of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step_*"))
    return json.loads((newest / "manifest.json").read_text())["files"]


def compare(mine: Path, other: Path, folder: Path, layouts: dict[str, tuple[str, ...]]) -> list[str]:
    """Returns the differences between the two trees, one sentence each."""
    data = folder / "data" / "text"
    megalite(
        mine, "prepare", "python-stdlib", "--train-vocab-size", "2048", "-t", f"{folder}/tokenizer", "-o", str(data)
    )
    shown = [megalite(tree, "config", "show", CONFIG) for tree in (other, mine)]
    differences = [] if shown[0] == shown[1] else ["config show prints another config"]
    for layout, options in layouts.items():
        runs = {name: folder / name / layout.replace(" ", "_") for name in ("other", "mine")}
        train(other, runs["other"], data, STEPS, options)
        train(mine, runs["mine"], data, STEPS, options)
        if records(runs["mine"]) != records(runs["other"]):
            differences.append(f"{layout}: metrics differ: {runs['mine']} and {runs['other']}")
        if digests(runs["mine"]) != digests(runs["other"]):
            differences.append(f"{layout}: checkpointed tensors differ")
        train(mine, runs["other"], data, STEPS + 2, options)  # this tree goes on from the other's checkpoint
        if records(runs["other"])[-1]["step"] != STEPS + 2:
            differences.append(f"{layout}: the other tree's checkpoint was not resumed")
        print(f"{layout}: {STEPS} steps compared, loss {records(runs['mine'])[-1]['loss']!r}", flush=True)
    return differences


def main() -> int:
    """Returns 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="revision to compare with, as in HEAD~1")
    parser.add_argument("--whole", action="store_true", help="more layouts, which takes five minutes longer")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    arguments = parser.parse_args()
    with tree_of(arguments.revision) as other, tempfile.TemporaryDirectory() as temporary:
        layouts = LAYOUTS | MORE if arguments.whole else LAYOUTS
        differences = compare(ROOT, other, (arguments.keep or Path(temporary)).resolve(), layouts)
    print("\n".join(differences) or f"equal to {arguments.revision} on {len(layouts)} layouts, bit for bit")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
