"""Predictions that runs make of themselves on this machine, compared with their measurements.

    python -m benchmarks.planner.own_runs              # a quarter of an hour; writes results/planner_own_runs.md
    python -m benchmarks.planner.own_runs --rounds 1   # each layout once, printed and not written
    python -m benchmarks.planner.own_runs --only tp=2  # layouts with these words, printed and not written

Trains a small Llama for some steps in several layouts, as a user would, in an empty cache and without calibration;
calibrates the machine's one constant on the first layout; then predicts the steps of the others with it. Memory is
predicted before each run and measured of every rank. All layouts are run several times, round by round, and the run
of each that took the median time counts: machines in a cloud differ from minute to minute. On a GPU the same command
takes layouts of as many GPUs as there are, and a larger model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import harness
from launch.runtime.devices import cpu_count, gpu_count

RESULTS = harness.RESULTS / "planner_own_runs.md"
MEGALITE = Path(sys.executable).parent / "megalite"
VOCABULARY = 1024  # of the data; the model's is larger
STEPS = 11
ROUNDS = 3
SMALL = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8192}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 32768}
# name, ranks, overrides; the first is calibrated on
LAYOUTS: list[tuple[str, int, list[str]]] = [
    ("serial", 1, []),
    ("serial, larger micro-batch", 1, ["training.micro_batch_size=4"]),
    ("serial, full recompute", 1, ["recompute.mode=full"]),
    ("serial, bf16", 1, ["precision.dtype=bf16"]),
    ("dp=2", 2, ["parallel.data_parallel_size=2"]),
    ("dp=2, zero=3", 2, ["parallel.data_parallel_size=2", "parallel.zero_stage=3"]),
    ("tp=2", 2, ["parallel.tensor_parallel_size=2"]),
    ("tp=2, sequence parallel", 2, ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]),
    ("pp=2", 2, ["parallel.pipeline_parallel_size=2"]),
    ("tp=2, pp=2", 4, ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"]),
]


@dataclass(frozen=True)
class RunOutcome:
    """One run."""

    name: str
    folder: Path
    receipt: dict[str, Any]
    step_s: float
    range_s: tuple[float, float]  # of a step, over the rounds

    @classmethod
    def median_of(cls, rounds: Sequence[RunOutcome]) -> RunOutcome:
        """The one of several runs of a layout that took the median time; the slower of two."""
        by_time = sorted(rounds, key=lambda outcome: outcome.step_s)
        return replace(by_time[len(by_time) // 2], range_s=(by_time[0].step_s, by_time[-1].step_s))

    def memory(self) -> list[tuple[int, float, float]]:
        """(rank, predicted, measured), MiB."""
        layout, stages = self.receipt["layout"], self.receipt["prediction"]["memory"]
        per_stage = layout["tensor_parallel_size"] * layout["data_parallel_size"]
        return [
            (rank, stages[rank // per_stage]["peak_mib"], one["peak_mib"])
            for rank, one in enumerate(self.receipt["measured"]["ranks"])
        ]


def prepare_data(folder: Path) -> Path:
    """Some of the Python standard library's own sources."""
    from data_pipeline.prepare.prepare import prepare
    from data_pipeline.sources.python_stdlib import python_stdlib_sources
    from data_pipeline.tokenizers.training import train_tokenizer

    sources = [path for path in python_stdlib_sources() if path.stat().st_size < 40_000][:80]
    train_tokenizer((path.read_text(encoding="utf-8") for path in sources), folder / "tokenizer", VOCABULARY)
    prepare([str(path) for path in sources], folder / "text", folder / "tokenizer", workers=1)
    return folder / "text"


def config_of(folder: Path, data: Path, on_gpu: bool) -> Path:
    """The config that all runs share."""
    config = {
        "run_dir": str(folder / "run"),
        "model": {
            **(LARGE if on_gpu else SMALL),
            "num_attention_heads": 16 if on_gpu else 6,
            "num_key_value_heads": 8 if on_gpu else 2,
            "max_position_embeddings": 2048 if on_gpu else 256,
        },
        "data": {"path": str(data)},
        "precision": {"dtype": "bf16" if on_gpu else "fp32"},
        "training": {
            "global_batch_size": 16 if on_gpu else 8,
            "micro_batch_size": 2,
            "sequence_length": 2048 if on_gpu else 256,
            "steps": 30 if on_gpu else STEPS,
        },
        "checkpoint": {"interval": 0, "save_last": False, "background": False},
        "monitor": {"plot": False},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def megalite(*words: str | Path, home: Path) -> str:
    """A command to its end, with a cache and a catalogue of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config")}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([MEGALITE, *map(str, words)], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"megalite {' '.join(map(str, words))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def run_all(folder: Path, layouts: list[tuple[str, int, list[str]]], rounds: int, on_gpu: bool) -> list[RunOutcome]:
    """Trains each layout, several times."""
    config = config_of(folder, prepare_data(folder), on_gpu)
    outcomes: list[list[RunOutcome]] = [[] for _ in layouts]
    for turn in range(rounds):
        for number, (name, _, overrides) in enumerate(layouts):
            run_dir = folder / f"{number}_{turn}"
            print(f"{name}, {turn + 1} of {rounds} ...", flush=True)
            said = megalite("train", config, f"run_dir={run_dir}", *overrides, home=folder)
            print("".join(f"  {line}\n" for line in said.splitlines() if "predicted" in line), end="", flush=True)
            receipt = json.loads((run_dir / "receipt.json").read_text())
            step_s = float(receipt["measured"]["step_time_s"])
            outcomes[number].append(RunOutcome(name, run_dir, receipt, step_s, (step_s, step_s)))
    return [RunOutcome.median_of(each) for each in outcomes]


def step_rows(outcomes: list[RunOutcome], folder: Path) -> tuple[list[str], float, list[float]]:
    """The table of step times, the constant that the first run gave, and the errors of the others with it."""
    megalite("plan", "calibrate", outcomes[0].folder, home=folder)
    folders = [outcome.folder for outcome in outcomes]
    told = json.loads(megalite("plan", "calibrate", "--dry-run", "--json", outcomes[0].folder, home=folder))
    constant = told["fits"][0]["efficiency"]
    rows, errors = [], []
    from launch.planning.calibration import read_run

    for outcome, path in zip(outcomes, folders, strict=True):
        run = read_run(path)
        before, after = (run.predicted_s(value) / run.measured_s - 1 for value in (run.whole.efficiency, constant))
        note = "calibrated on" if outcome is outcomes[0] else f"{after:+.1%}"
        rows.append(
            f"| {outcome.name} | {1000 * run.measured_s:.0f} | "
            f"{1000 * outcome.range_s[0]:.0f}-{1000 * outcome.range_s[1]:.0f} | {before:+.1%} | "
            f"{1000 * run.predicted_s(constant):.0f} | {note} |"
        )
        errors += [] if outcome is outcomes[0] else [abs(after)]
    return rows, constant, errors


def memory_rows(outcomes: list[RunOutcome]) -> tuple[list[str], list[float]]:
    """The table of memory, and the errors of all ranks."""
    rows, errors = [], []
    for outcome in outcomes:
        for rank, predicted, measured in outcome.memory():
            errors.append(abs(predicted / measured - 1))
            rows.append(
                f"| {outcome.name} | {rank} | {measured:.0f} | {predicted:.0f} | {predicted / measured - 1:+.1%} |"
            )
    return rows, errors


def report(outcomes: list[RunOutcome], rounds: int, folder: Path) -> str:
    """The results file."""
    steps, constant, step_errors = step_rows(outcomes, folder)
    memory, memory_errors = memory_rows(outcomes)
    body = [
        f"## Step time, ms: efficiency {constant:.3g}, fitted on the first run alone",
        "",
        *harness.header(
            "layout", "measured", "over the rounds", "error before calibration", "predicted after", "error after"
        ),
        *steps,
        "",
    ]
    if step_errors:
        worst, mean = max(step_errors), statistics.mean(step_errors)
        body += [f"Mean error of the others {mean:.1%}, largest {worst:.1%}.", ""]
    body += [
        "## Peak memory of each rank, MiB",
        "",
        *harness.header("layout", "rank", "measured", "predicted", "error"),
        *memory,
        "",
        f"Mean error {statistics.mean(memory_errors):.1%}, largest {max(memory_errors):.1%}.",
    ]
    facts = f"{harness.machine('torch', 'deepspeed')}, {outcomes[0].receipt['prediction']['accelerator']}"
    return harness.page(
        "What runs predict of themselves, and what they need",
        "benchmarks.planner.own_runs",
        f"{facts}; the median of {rounds} runs each.",
        *body,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="layouts with these words, beside the first; the results file stays")
    parser.add_argument(
        "--rounds",
        type=int,
        choices=range(1, 10),
        default=ROUNDS,
        metavar="N",
        help=f"of all layouts; default: {ROUNDS}",
    )
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs, kept")
    options = parser.parse_args()
    gpus = gpu_count()
    fitting = [one for one in LAYOUTS if one[1] <= (gpus or 2 * cpu_count())]
    layouts = [one for one in fitting if one is LAYOUTS[0] or options.only is None or options.only in one[0]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text = report(run_all(folder, layouts, options.rounds, bool(gpus)), options.rounds, folder)
    print(text)
    if options.only is None and options.rounds >= ROUNDS:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
