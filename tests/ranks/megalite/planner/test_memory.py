"""Predicted memory of each rank against what real ranks then have.

Their model is so small that it trains in seconds and so large that tensors dominate. malloc maps every tensor for
itself here and gives it back, so what is resident is what is allocated, and a part that the planner does not know would
show; benchmarks/planner/memory.py measures in the environment of `megalite train`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import resolve_layout
from megalite.parallel.mesh import Mesh
from megalite.planner.cost.memory import CPU, memory_of
from megalite.planner.workload import TrainingWorkload
from tests.helpers.engine_cases import Case

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SMALL = MODEL | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 704}
# Two steps: in the second one moments exist beside activations. What distinguishes each: activations; the step; flat
# fp32 gradients; replicas; buckets; gathered weights; cuts; stages
CASES = [
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, recompute="full"),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, dtype="bf16"),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=2, dp=2),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=2, dp=2, zero=2),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=2, dp=2, zero=3),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, tp=2),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=2, pp=2, accumulation=3),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, cp=2, cp_kind="all_gather"),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, cp=2, cp_kind="ulysses"),
    Case(model=MODEL | EXPERTS, sequence=512, steps=2, micro_batch=2, dp=2, ep=2),
    Case(model=MODEL | EXPERTS, sequence=512, steps=2, micro_batch=2, dp=2),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, offload={"optimizer": "cpu"}),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, dtype="bf16", offload={"optimizer": "cpu"}),
    Case(model=MODEL, sequence=512, steps=2, micro_batch=4, offload={"activations": "cpu"}),
]
LESS_DISTINCT = [*CASES[:5], CASES[6], *CASES[-4:]]  # from others by one term of the sum each
RETURNS_MEMORY = "glibc.malloc.mmap_threshold=1048576"
SERVER = """
import json, sys
answers, sys.stdout = sys.stdout, sys.stderr  # libraries print as well
import tests.ranks.megalite.planner.test_memory as here
from launch.parity.forked_ranks import run_ranks, warm_up
warm_up({"DS_ACCELERATOR": "cpu"}, imports=[here.__name__])
for line in sys.stdin:
    case = here.CASES[int(line)]
    print(json.dumps(run_ranks(here.train, case.world_size, case, timeout_s=300)), file=answers, flush=True)
"""
Measure = Callable[[Case], list[tuple[float, float]]]


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    """(resident before the model, resident at most) of each rank, forked by a process of its own: malloc reads its
    settings as a process starts, and other tests share a server of ranks."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"GLIBC_TUNABLES": RETURNS_MEMORY},
        cwd=Path(__file__).parents[4],
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(case: Case) -> list[tuple[float, float]]:
            print(CASES.index(case), file=requests, flush=True)
            return [(before, peak) for before, peak in json.loads(answers.readline())]

        yield ask


def train(rank: int, case: Case) -> tuple[float, float]:
    """Trains the case; what `measure` returns of this rank."""
    import psutil

    from megalite.monitor.memory import peak_memory_mib
    from tests.helpers.engine_cases import engine_of, global_batches, micro_batches_of

    before = 0
    for each in (replace(case, model=case.model | SMALL, sequence=16), case):
        before = psutil.Process().memory_info().rss
        engine = engine_of(each)
        for batch in global_batches(each):
            engine.train_step(micro_batches_of(engine, each, batch), 1e-3)
    return before, peak_memory_mib() * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.exhaustive if case in LESS_DISTINCT else ()) for case in CASES],
    ids=str,
)
def test_peak_of_each_rank(case: Case, measure: Measure) -> None:
    """What the ranks take beside their baseline: not hidden behind what python and torch take anyway. A small model is
    trained before, so that the baseline has the pages of libraries: a kernel takes those away that nobody uses for a
    while, and they would come back beside the tensors."""
    config, mesh = case.config(), Mesh(case.tp, case.pp, case.dp, case.cp, case.ep)
    job = TrainingWorkload.of(config, resolve_layout(config, case.world_size, "cpu"))
    stages = memory_of(job, replace(CPU, keeps_freed=False))
    for rank, (before, peak) in enumerate(measure(case)):
        predicted = stages[mesh.coordinate(rank).pipeline_rank]
        tensors = predicted.total - predicted.parts["context"]
        mib = f"{tensors / 2**20:.0f} MiB predicted, {(peak - before) / 2**20:.0f} measured"
        assert tensors == pytest.approx(peak - before, rel=0.10), f"rank {rank}: {mib} {predicted}"
