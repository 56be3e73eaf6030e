"""Published formulas of memory, and their results beside published figures: Korthikanti 2022, figures 1 and 7, ZeRO's
table 1, and BLOOM's sweep.

Figures 1 and 7 and table 1 are arithmetic and must agree. BLOOM's column was read off one GPU, in whole GB;
nothing is fitted on it. Left out of it: line 634, whose 65 GB its own neighbours contradict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.planner.bloom import DEFECTIVE, TABLE, run_of
from benchmarks.planner.published import MEGATRON_2022, Row, gpt, read
from megalite.planner.cost.memory import CUDA, Device, StageMemory, with_device
from megalite.planner.cost.model_states import MOMENTS, States
from megalite.planner.cost.stage_parameters import StageShape, cut, stages_of_job
from megalite.planner.workload import BYTES, ParallelLayout, Recompute, TrainingWorkload

GIB = 2**30
MODES: dict[str, tuple[Recompute, bool]] = {
    "none": ("none", False),
    "seq": ("none", True),
    "selective": ("selective", False),
    "seqsel": ("selective", True),
    "seq+selective": ("selective", True),
    "full": ("full", False),
}
MIXED = TrainingWorkload(gpt(1024, 1, 16, 1024), ParallelLayout(), 2048, 1, "bf16", "bf16", stack=MEGATRON_2022)


def korthikanti_block_bytes(
    s: int, b: int, h: int, a: int, t: int, recompute: Recompute = "none", sequence_parallel: bool = False
) -> float:
    """Returns the bytes that a GPT block in 16 bits with dropout keeps, scores included (Korthikanti 2022, Table 2).

    `full` keeps the block's input; Table 2 has it whole on every rank, also under sequence parallelism. s tokens of a
    sequence, b sequences of a micro-batch, h hidden size, a heads, t tensor-parallel ranks.
    """
    if recompute == "full":
        return 2 * s * b * h
    scores = 0.0 if recompute == "selective" else 5 * a * s / (h * t)
    outside, inside = (10 / t if sequence_parallel else 10), 24 / t
    return s * b * h * (outside + inside + scores)


def blocks_in_flight(blocks: int, p: int, v: int = 1) -> float:
    """Returns how many blocks' activations the first of p stages keeps at once (Korthikanti 2022, section 4.2.3).

    1F1B keeps p micro-batches of L/p blocks; interleaving v chunks takes (1 + (p - 1) / (p v)) times as many.
    """
    return blocks * (1.0 if v == 1 else 1 + (p - 1) / (p * v))


def interleaved_in_flight(p: int, stage: int, micro_batches: int, v: int) -> float:
    """Returns the micro-batches that a stage of v chunks keeps at once."""
    if v == 1:
        return min(p - stage, micro_batches)
    # chunks of L / (p v) blocks that warm up before the first backward, of v per micro-batch (Megatron-LM)
    return min(2 * (p - stage - 1) + (v - 1) * p + 1, micro_batches * v) / v


def published_states(job: TrainingWorkload, numbers: float) -> States:
    """Returns the states without buffers, as papers count them. ZeRO stage 0 shards nothing."""
    zero, d = job.layout.zero_stage, job.layout.data_parallel_size
    size, accumulated = BYTES[job.dtype], BYTES[job.gradient_accumulation_dtype]
    return States(
        weights=size * numbers / (d if zero >= 3 else 1),
        optimizer=4 * (MOMENTS[job.optimizer] + (size < 4)) * numbers / (d if zero >= 1 else 1),
        gradients=accumulated * numbers / (d if zero >= 2 else 1),
    )


def total(states: States) -> float:
    """Returns the bytes of weights, gradients and optimizer, as ZeRO's paper counts them."""
    return states.weights + states.gradients + states.optimizer


def published_memory_of(job: TrainingWorkload, device: Device) -> tuple[StageMemory, ...]:
    """Returns the memory of each stage of Megatron-LM, by the published formulas."""
    return tuple(_stage_memory(job, stage, shape, device) for stage, shape in enumerate(stages_of_job(job)))


def _stage_memory(job: TrainingWorkload, stage: int, shape: StageShape, device: Device) -> StageMemory:
    layout, model = job.layout, job.model
    states = published_states(job, shape.parameters)
    p, v, tp = layout.pipeline_parallel_size, layout.pipeline_chunks, layout.tensor_parallel_size
    s, b, h = job.sequence_length, layout.micro_batch_size, model.hidden_size
    (recompute,) = set(layout.recompute_by_stage)  # no published row has several
    if recompute == "none" and job.stack.attention != "materialized":
        recompute = "selective"  # FlashAttention keeps no scores
    block = korthikanti_block_bytes(s, b, h, model.num_attention_heads, tp, recompute, layout.sequence_parallel)
    if stage == 0 and job.micro_batches >= p:
        blocks = blocks_in_flight(shape.blocks * p, p, v)
    else:
        blocks = interleaved_in_flight(p, stage, job.micro_batches, v) * shape.blocks
    live = 0.0  # of the block that is recomputed
    if recompute != "none":
        again: Recompute = "none" if job.stack.attention == "materialized" else "selective"
        live = korthikanti_block_bytes(s, b, h, model.num_attention_heads, tp, again, layout.sequence_parallel) - block
    rows = cut(model.vocab_size, tp)
    logits = 4.0 * s * b * rows if shape.has_head else 0.0  # in fp32
    parts = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": blocks * block + live,
        "logits": logits,
    }
    return StageMemory(stage, with_device(parts, device))


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
        yield Figure(f"{name}, states", total(states) / GIB, float(row["params_and_optimizer_GiB"]))
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
            ours = total(published_states(replace(MIXED, layout=layout), numbers)) / 1e9
            yield Figure(f"{row['model']} on {row['DP']}, stage {zero}", ours, float(row[f"{column}_formula"]))


def bloom() -> Iterator[Figure]:
    """GB of the fullest rank, with what `memory.CUDA` takes for allocator and context."""
    for row in read(TABLE):
        if row["md_line"] in DEFECTIVE.keys() | {"634"} or not row["layers"] or row["zero"] != "1":
            continue
        stages = published_memory_of(run_of(row).job, CUDA)
        name = f"{row['size']}, PP {row['PP']}, micro-batch {row['MBS']}"
        yield Figure(name, max(stage.total for stage in stages) / 1e9, float(row["mem_GB"]))


def _first_stage(run: Row, mode: str) -> float:
    s, b, h, a, t = (int(run[key]) for key in ("seq", "micro_batch", "hidden", "heads", "TP"))
    blocks = blocks_in_flight(int(run["layers"]), int(run["PP"]), int(run["virtual_stages"]))
    return korthikanti_block_bytes(s, b, h, a, t, *MODES[mode]) * blocks
