"""The planner's memory beside published figures: Korthikanti 2022, figures 1 and 7, ZeRO's table 1, and what BLOOM's
sweep printed.

Figures 1 and 7 and table 1 are arithmetic, and must be met. BLOOM's column is what was read off one GPU, in whole GB;
nothing is fitted on it. Left out of it: line 634, whose 65 GB its own neighbours contradict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.planner_bloom import DEFECTIVE, TABLE, run_of
from benchmarks.planner_published import MEGATRON_2022, Row, gpt, read
from megalite.planner.activations import blocks_in_flight, korthikanti_block_bytes
from megalite.planner.job import Job, Layout, Recompute
from megalite.planner.memory import CUDA, memory_of
from megalite.planner.states import published_states

GIB = 2**30
MODES: dict[str, tuple[Recompute, bool]] = {
    "none": ("none", False),
    "seq": ("none", True),
    "selective": ("selective", False),
    "seqsel": ("selective", True),
    "seq+selective": ("selective", True),
    "full": ("full", False),
}
MIXED = Job(gpt(1024, 1, 16, 1024), Layout(), 2048, 1, "bf16", "bf16", stack=MEGATRON_2022)


@dataclass(frozen=True)
class Figure:
    """One published value beside ours."""

    name: str
    ours: float
    published: float

    @property
    def error(self) -> float:
        return self.ours - self.published


def figure_1() -> Iterator[Figure]:
    """GiB: weights, gradients and optimizer (18 bytes of 12 L h^2 parameters), and the first stage's activations."""
    runs = {row["model"]: row for row in read("korthikanti_table5")}
    for row in read("korthikanti_fig1_memory_gib"):
        run = runs[row["model"]]
        numbers = 12 * int(run["layers"]) * int(run["hidden"]) ** 2 / (int(run["TP"]) * int(run["PP"]))
        states = published_states(replace(MIXED, gradient_accumulation_dtype="fp32"), numbers)
        name = f"{row['model']} {row['mode']}"
        yield Figure(f"{name}, states", states.total / GIB, float(row["params_and_optimizer_GiB"]))
        yield Figure(f"{name}, activations", _first_stage(run, row["mode"]) / GIB, float(row["activations_GiB"]))


def figure_7() -> Iterator[Figure]:
    """Percent of what tensor parallelism alone keeps."""
    runs = {row["model"]: row for row in read("korthikanti_table5")}
    for row in read("korthikanti_fig7_activation_pct"):
        whole = _first_stage(runs[row["model"]], "none")
        for mode in ("none", "seq", "selective", "seq+selective", "full"):
            ours = 100 * _first_stage(runs[row["model"]], mode) / whole
            yield Figure(f"{row['model']} {mode}", ours, float(row[mode]))


def zero_table_1() -> Iterator[Figure]:
    """GB, in 16 bits."""
    for row in read("zero_table1_gb"):
        numbers = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[row["model"]]
        for zero, column in ((1, "Pos"), (2, "Pos+g"), (3, "Pos+g+p")):
            layout = replace(MIXED.layout, zero_stage=zero, data_parallel_size=int(row["DP"]))
            ours = published_states(replace(MIXED, layout=layout), numbers).total / 1e9
            yield Figure(f"{row['model']} on {row['DP']}, stage {zero}", ours, float(row[f"{column}_formula"]))


def bloom() -> Iterator[Figure]:
    """GB of the fullest rank, with what `memory.CUDA` takes for allocator and context."""
    for row in read(TABLE):
        if row["md_line"] in DEFECTIVE.keys() | {"634"} or not row["layers"] or row["zero"] != "1":
            continue
        stages = memory_of(run_of(row).job, CUDA)
        name = f"{row['size']}, PP {row['PP']}, micro-batch {row['MBS']}"
        yield Figure(name, max(stage.total for stage in stages) / 1e9, float(row["mem_GB"]))


def _first_stage(run: Row, mode: str) -> float:
    s, b, h, a, t = (int(run[key]) for key in ("seq", "micro_batch", "hidden", "heads", "TP"))
    blocks = blocks_in_flight(int(run["layers"]), int(run["PP"]), int(run["virtual_stages"]))
    return korthikanti_block_bytes(s, b, h, a, t, *MODES[mode]) * blocks
