"""Predicted against measured memory: ours of each rank on this CPU, layout by layout, and published figures.

    python -m benchmarks.planner.memory                 # some ten minutes; writes benchmarks/results/planner_memory.md
    python -m benchmarks.planner.memory --only tp=2     # layouts with these words, printed and not written
    python -m benchmarks.planner.memory --published     # the published figures only, printed: no rank is started

Ours, in two ways. *Tensors*: the most bytes that torch has allocated at once, as its profiler counts them, against
`memory_of(job, Device("cpu"))`; that tells whether the model knows all tensors. *Process*: the peak resident set that
a run reports, in the environment that `megalite train` gives its ranks, against `memory_of(job, CPU)` and what the
process had before its model was built; that is what has to fit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":  # before torch is imported by anybody: malloc reads it when a process starts
    from launch.runtime.local_ranks import MALLOC_TUNABLES

    os.environ.setdefault("GLIBC_TUNABLES", MALLOC_TUNABLES)

from benchmarks import harness
from benchmarks.planner.bloom import ALONE, DEFECTIVE, TABLE, run_of
from benchmarks.planner.memory_published import published_memory_of
from benchmarks.planner.published import read
from launch.runtime.host_probe import has_bf16_units
from megalite.config import ModelConfig, ResolvedLayout, resolve_layout
from megalite.config.rules.known_bad import installed_versions
from megalite.parallel.mesh import Mesh
from megalite.planner.cost.memory import CPU, TENSORS, Device, StageMemory, memory_of
from megalite.planner.workload import ParallelLayout, TrainingWorkload
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks

RESULTS = harness.RESULTS / "planner_memory.md"
LEFT_OUT = {"634": "more memory than with twice the micro-batch", "670": "another branch of the code, without ZeRO"}
LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
ORDINARY = Case(model=MODEL, micro_batch=2, sequence=512, steps=5)
CASES = [
    replace(ORDINARY, **changes)
    for changes in (
        {},
        {"dtype": "bf16"},
        {"accumulation": 3},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"micro_batch": 6},
        {"optimizer": "sgd"},
        {"dp": 2},
        {"dp": 2, "dtype": "bf16"},
        {"dp": 2, "zero": 2},
        {"dp": 2, "zero": 2, "accumulation": 3},
        {"dp": 2, "zero": 2, "dtype": "bf16"},
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 3, "dtype": "bf16"},
        {"dp": 3},
        {"tp": 2},
        {"tp": 2, "dtype": "bf16"},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "sequence_parallel": True, "recompute": "full"},
        {"tp": 4},
        {"tp": 2, "dp": 2, "zero": 2},
        {"tp": 2, "dp": 2, "zero": 3},
        {"pp": 2, "accumulation": 3},
        {"pp": 2, "accumulation": 3, "dtype": "bf16"},
        {"pp": 2, "accumulation": 3, "recompute": "full"},
        {"pp": 2, "accumulation": 3, "model": MODEL | {"tie_word_embeddings": True}},
        {"pp": 4, "accumulation": 6},
        {"pp": 2, "tp": 2, "accumulation": 3},
        {"pp": 2, "dp": 2, "accumulation": 3},
    )
]


@dataclass(frozen=True)
class Measured:
    """On one rank, in bytes."""

    baseline: float  # resident before the model was built
    peak: float  # resident at most
    tensors: float  # allocated by torch at once, at most


def job_of(case: Case) -> tuple[TrainingWorkload, ResolvedLayout]:
    """Returns the workload for the planner."""
    config = case.config()
    layout = resolve_layout(config, case.world_size, "cpu")
    return TrainingWorkload.of(config, layout), layout


def measure(case: Case) -> list[Measured]:
    """On real ranks, twice: a profiler takes memory of its own."""
    processes = run_fresh_ranks(_peak_of_process, case.world_size, case, timeout_s=600)
    tensors = run_fresh_ranks(_peak_of_tensors, case.world_size, replace(case, steps=2), timeout_s=600)
    return [Measured(before, peak, most) for (before, peak), most in zip(processes, tensors, strict=True)]


def _train(case: Case) -> None:
    engine, batches = engine_of(case), global_batches(case)
    for batch in batches:
        engine.train_step(micro_batches_of(engine, case, batch), 1e-3)


def _peak_of_process(rank: int, case: Case) -> tuple[float, float]:
    from megalite.monitor.memory import peak_memory_mib

    before = psutil.Process().memory_info().rss  # as launch/trainer/prediction_tracker.py
    _train(case)
    return before, peak_memory_mib() * 2**20


def _peak_of_tensors(rank: int, case: Case) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _train(case)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


@dataclass(frozen=True)
class Row:
    """One rank of one layout; MiB."""

    case: Case
    rank: int
    measured: Measured
    tensors: StageMemory
    process: StageMemory

    @property
    def tensor_error(self) -> float:
        return self.tensors.total / self.measured.tensors - 1

    @property
    def process_error(self) -> float:
        return (self.process.total + self.measured.baseline) / self.measured.peak - 1


def rows_of(case: Case) -> list[Row]:
    """Predicted and measured."""
    job, layout = job_of(case)
    mesh = Mesh.of(layout)
    is_wide = not has_bf16_units()
    tensors = memory_of(job, Device("cpu", widens_bf16=is_wide))
    process = memory_of(job, replace(CPU, widens_bf16=is_wide))
    rows = []
    for rank, measured in enumerate(measure(case)):
        stage = mesh.coordinate(rank).pipeline_rank
        rows.append(Row(case, rank, measured, tensors[stage], process[stage]))
    return rows


def name_of(case: Case) -> str:
    """Names the differences from the ordinary case."""
    changed = {key: value for key, value in vars(case).items() if value != getattr(ORDINARY, key)}
    if "model" in changed:
        changed |= {key: value for key, value in changed.pop("model").items() if value != MODEL.get(key)}
    return " ".join(f"{key}={value}" for key, value in changed.items()) or "serial"


def line(row: Row) -> str:
    """Returns a line of the table."""
    measured, mib = row.measured, 2**20
    cells = [name_of(row.case), row.rank, row.tensors.moment]
    cells += [f"{row.tensors.total / mib:.0f}", f"{measured.tensors / mib:.0f}", f"{row.tensor_error:+.1%}"]
    cells += [f"{(row.process.total + measured.baseline) / mib:.0f}", f"{measured.peak / mib:.0f}"]
    cells += [f"{measured.baseline / mib:.0f}", f"{row.process_error:+.1%}"]
    return harness.row(cells)


HEADER = harness.header(
    *("layout", "rank", "tensors: most is needed in the", "predicted MiB", "measured", "error"),
    *("process: predicted MiB", "measured", "of which before the model", "error"),
)


def bloom() -> list[str]:
    """The fullest stage of BLOOM's topology sweep: one factor, fitted on every other run and held against the rest."""
    runs: dict[TrainingWorkload, tuple[float, float]] = {}
    for row in read(TABLE):
        if row["md_line"] in DEFECTIVE.keys() | LEFT_OUT.keys() | ALONE or not row["mem_GB"]:
            continue
        job = run_of(row).job
        runs[job] = float(row["mem_GB"]), max(stage.total for stage in published_memory_of(job, TENSORS)) / 2**30
    fitted, held = list(runs.values())[::2], list(runs.values())[1::2]
    factor = sum(measured for measured, _ in fitted) / sum(predicted for _, predicted in fitted)
    errors = [factor * predicted / measured - 1 for measured, predicted in held]
    return [
        f"BLOOM's topology sweep (Megatron-DeepSpeed, {len(runs)} runs on A100-80GB, full recomputation): the "
        f"formulas alone are {1 / factor - 1:+.0%} off. With one factor, {factor:.2f}, fitted on every other run, the "
        f"mean error of the {len(held)} others is {statistics.mean(map(abs, errors)):.1%}, the worst "
        f"{max(errors, key=abs):+.1%}. The factor holds DeepSpeed's buffers of 2022, NCCL's and the context, none of "
        "which is printed."
    ]


def torchtitan() -> list[str]:
    """Llama 3 8B under FSDP on 8 and on 128 GPUs: what their difference says about states, which activations do not."""
    rows = {int(row["gpus"]): row for row in read("torchtitan_llama_8b_h100") if row["techniques"] == "FSDP"}
    totals = {
        gpus: sum(
            stage.total
            for stage in memory_of(
                TrainingWorkload(
                    LLAMA_8B, ParallelLayout(data_parallel_size=gpus, zero_stage=3, micro_batch_size=2), 8192, 2 * gpus
                ),
                TENSORS,
            )
        )
        / 2**30
        for gpus in rows
    }
    said = ", ".join(
        f"{totals[gpus]:.1f} GiB on {gpus} GPUs (measured {float(row['memory_GiB']):.1f}, some of it recomputed)"
        for gpus, row in sorted(rows.items())
    )
    saved, published = totals[8] - totals[128], float(rows[8]["memory_GiB"]) - float(rows[128]["memory_GiB"])
    return [
        f"torchtitan's Llama 3 8B, sequences of 8192 in micro-batches of 2, taken as ours with ZeRO-3: {said}. Its "
        "recomputation by operator is not ours, so activations cannot be compared; what 16 times as many replicas save "
        f"can: {saved:.1f} GiB, measured {published:.1f}."
    ]


def report(rows: list[Row]) -> str:
    """The page."""
    within = sum(abs(row.process_error) <= 0.1 for row in rows)
    exact = sum(abs(row.tensor_error) <= 0.05 for row in rows)
    worst = max(rows, key=lambda row: abs(row.process_error))
    return harness.page(
        "Memory: predicted and measured",
        "benchmarks.planner.memory",
        f"{harness.machine(*installed_versions())}, gloo.",
        f"Of {len(rows)} ranks the tensors of {exact} are predicted within 5 %, the process of {within} within "
        f"10 %; the worst process is off by {worst.process_error:+.1%} ({name_of(worst.case)}).",
        "",
        "The model: hidden 640, 5 layers, 8 heads, 4 key/value heads, 1792 intermediate features, 8192 tokens; two "
        "sequences of 512 tokens in a micro-batch, fp32. *Process* is the peak resident set after five steps, in "
        "the environment of `megalite train`, where malloc keeps what is freed; it differs between runs, and "
        "between ranks of one run that do the same, by up to 18 %. What tensors take follows from formulas; the "
        "room that malloc loses between them is a model of a few measured constants (`_own_room`, `_gathers` and "
        "`_pieces` of megalite/planner/cost/memory.py), and they were measured on these layouts.",
        "",
        *HEADER,
        *map(line, rows),
        "",
        "## Published figures",
        "",
        "Korthikanti 2022, Figures 1 and 7, and ZeRO's Table 1 are tests: "
        "tests/unit/megalite/planner/cost/test_memory.py.",
        "",
        *bloom(),
        "",
        *torchtitan(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run layouts that have these words, such as tp=2,pp=2")
    parser.add_argument("--published", action="store_true", help="start no ranks")
    arguments = parser.parse_args()
    if arguments.published:
        print("\n".join([*bloom(), *torchtitan()]))
        return 0
    words = set(filter(None, arguments.only.split(",")))
    rows: list[Row] = []
    print("\n".join(HEADER))
    for case in CASES:
        if words <= set(name_of(case).split()):
            rows += rows_of(case)
            print("\n".join(line(row) for row in rows[-case.world_size :]), flush=True)
    if not words:
        RESULTS.write_text(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
