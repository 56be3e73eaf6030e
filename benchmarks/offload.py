"""Parity, memory and time of a training step with each offloading option, beside the same step without.

    python -m benchmarks.offload               # four minutes; writes the results
    python -m benchmarks.offload --rounds 3    # a look, printed only

One process holds an engine per variant, all at the same initial weights: Llama, 4 layers, hidden 256, 7 million
parameters, fp32, AdamW with a clip that bites, two micro-batches of 2 x 256 tokens. The variants take their steps in
turns, in changing order, on the same random tokens. The ratio is the median over the rounds of a variant's step / that
without offloading, with the quartiles behind it; losses and weights are compared after the last round.

Peak memory is that of a process of its own per variant, which takes two steps; what was resident before its model is
left out. Activations are counted when the loss is computed: those of the blocks of one micro-batch, by where they are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks import harness
from launch.runtime.local_ranks import free_port

RESULTS = harness.RESULTS / "offload.md"
WARM_UP, PEAK_STEPS = 1, 2
MICRO_BATCHES, ROWS, SEQUENCE, VOCABULARY = 2, 2, 256, 8192
MIB = 2**20
NONE, TORCH, DEEPSPEED, ACTIVATIONS = "none", "optimizer, torch's AdamW", "optimizer, DeepSpeed's Adam", "activations"
BOTH = "both"
OPTIONS: dict[str, dict[str, str]] = {  # the section `offload` of each variant
    NONE: {},
    TORCH: {"optimizer": "cpu"},
    DEEPSPEED: {"optimizer": "cpu"},
    ACTIVATIONS: {"activations": "cpu"},
    BOTH: {"optimizer": "cpu", "activations": "cpu"},
}


def config_of(variant: str) -> Any:
    model = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    options: dict[str, Any] = {"training": {"gradient_clipping": 0.5}, "offload": OPTIONS[variant]}
    rows = MICRO_BATCHES * ROWS
    return harness.config_of(model, rows, SEQUENCE, micro_batch=ROWS, precision={"dtype": "fp32"}, **options)


def engine_of(variant: str) -> Any:
    """Returns the engine of a variant on this process; all have the same seed, so the same weights."""
    from megalite.config import resolve_layout
    from megalite.engine.build import build_engine
    from megalite.planner.cost.stage_parameters import recompute_of_blocks
    from models.decoder import layers_of

    config = config_of(variant)
    layout = resolve_layout(config, 1, "cpu")
    hidden = {"XDG_CACHE_HOME": os.devnull} if variant in (TORCH, BOTH) else {}  # where nothing can be compiled
    with patch.dict(os.environ, hidden):
        return build_engine(layers_of(config, recompute_of_blocks(config, layout)), config, layout)


def batches_of(draw: np.random.Generator) -> list[Any]:
    return harness.random_batches(draw, VOCABULARY, (MICRO_BATCHES, ROWS, SEQUENCE))


def start() -> None:
    """Makes this process a run of one rank."""
    from megalite.engine.deepspeed.process_groups import start_distributed

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    start_distributed(0, timedelta(minutes=30))


def peak_mib(variant: str) -> float:
    """Returns what this process needs at most for a variant's first steps, beside what it had before its model."""
    from megalite.monitor.memory import peak_memory_mib

    start()
    before = psutil.Process().memory_info().rss / MIB
    engine, draw = engine_of(variant), np.random.default_rng(0)
    for _ in range(PEAK_STEPS):
        engine.train_step(batches_of(draw), 1e-3)
    return peak_memory_mib() - before


def kept_activations(engine: Any) -> tuple[float, ...]:
    """Returns the MiB that blocks keep for one micro-batch's backward, and those of them that are on the device."""
    import megalite.engine.stages as stages
    from megalite.parallel.activation_offload import OffloadedStorage

    head_loss, found = stages.head_loss, list[tuple[float, ...]]()  # type: ignore[attr-defined]

    def counted(*arguments: Any) -> Any:
        moved = [each for each in gc.get_objects() if isinstance(each, OffloadedStorage)]
        found.append(
            tuple(
                sum(each.on_host.nbytes() for each in moved if is_counted(each)) / MIB
                for is_counted in (lambda each: True, lambda each: each.on_device is not None)
            )
        )
        return head_loss(*arguments)

    with patch.object(stages, "head_loss", counted):
        engine.train_step(batches_of(np.random.default_rng(1)), 0.0)
    return found[-1]


def compare(rounds: int) -> tuple[dict[str, list[float]], dict[str, tuple[float, float]], tuple[float, ...]]:
    """Returns each variant's seconds per step, how far its last loss (relative) and weights (absolute) are from those
    without offloading, and `kept_activations`."""
    import torch

    start()
    engines = {variant: engine_of(variant) for variant in OPTIONS}
    draw, took = np.random.default_rng(0), {variant: list[float]() for variant in OPTIONS}
    losses: dict[str, float] = {}
    for number in range(WARM_UP + rounds):
        batches, order = batches_of(draw), list(engines)
        for variant in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            result = engines[variant].train_step(batches, 1e-3)
            losses[variant] = float(result.loss)
            took[variant].append(time.perf_counter() - began)
            assert float(result.grad_norm) > 0.5, "the clip bites"
    weights = {
        variant: torch.cat([p.detach().flatten() for _, p in engine.parameters()])
        for variant, engine in engines.items()
    }
    apart = {
        variant: (abs(losses[variant] / losses[NONE] - 1), float((weights[variant] - weights[NONE]).abs().max()))
        for variant in OPTIONS
    }
    return {variant: seconds[WARM_UP:] for variant, seconds in took.items()}, apart, kept_activations(engines[BOTH])


def predicted_mib(variant: str) -> tuple[float, float]:
    """Returns the planner's memory of a GPU with this run's model, beside its context, and of its host."""
    from megalite.config import resolve_layout
    from megalite.planner.cost.memory import TENSORS, memory_of
    from megalite.planner.workload import TrainingWorkload

    config = config_of(variant)
    (stage,) = memory_of(TrainingWorkload.of(config, resolve_layout(config, 1, "cuda")), TENSORS)
    return stage.total / MIB, stage.on_host / MIB


def rows_of(took: dict[str, list[float]], apart: dict[str, tuple[float, float]], peaks: dict[str, float]) -> list[str]:
    """Returns the table's rows."""
    rows = []
    for variant, seconds in took.items():
        ratios = [a / b for a, b in zip(seconds, took[NONE], strict=True)]
        loss, weights = apart[variant]
        device, host = predicted_mib(variant)
        cells = [variant, f"{1000 * statistics.median(seconds):.0f}", harness.quartiles(ratios)]
        cells += [f"{loss:.0e}", f"{weights:.0e}", f"{peaks[variant]:.0f}", f"{device:.0f}", f"{host:.0f}"]
        rows.append(harness.row(cells))
    return rows


def report(rows: Sequence[str], kept: tuple[float, ...], rounds: int, load: harness.Load) -> str:
    """Returns the results file, up to what is written by hand below it."""
    columns = ("ms a step", "of none (quartiles)", "loss differs by", "weights differ by", "peak MiB here")
    return harness.page(
        "A training step with offloading, on a CPU",
        "benchmarks.offload",
        f"{harness.machine('torch', 'deepspeed')}. {load} Median of {rounds} rounds.",
        *harness.header("`offload`", *columns, "predicted MiB on a GPU", "and on its host"),
        *rows,
        "",
        f"Blocks keep {kept[0]:.0f} MiB for the backward pass of one micro-batch; with `offload.activations: cpu` "
        f"{kept[1]:.0f} MiB of them are on the device when the loss is computed.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="steps of each variant; the results file stays")
    parser.add_argument("--peak", choices=OPTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak_mib(options.peak)))
        return
    rounds, load = options.rounds or 5, harness.Load()
    peaks = {}
    for variant in OPTIONS:
        command = [sys.executable, "-m", "benchmarks.offload", "--peak", variant]
        peaks[variant] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1])
    took, apart, kept = compare(rounds)
    harness.show(report(rows_of(took, apart, peaks), kept, rounds, load), RESULTS, renews=options.rounds is None)


if __name__ == "__main__":
    main()
