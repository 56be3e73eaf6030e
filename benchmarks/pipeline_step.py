"""A training step under a pipeline: this checkout against another revision, in time, CPU time and peak memory.

    python -m benchmarks.pipeline_step REVISION                           # four minutes; writes the results
    python -m benchmarks.pipeline_step REVISION --only "small fp32 pp2"   # a look, printed only

Revision and this checkout train the same random tokens with `build_engine` and `train_step`: Llama, 4 layers, vocab
1024, eight micro-batches of 2 x 64 tokens, 1F1B, ZeRO-1, AdamW; hidden 64 (small) or 512 (medium). Ranks are in the
environment that `megalite train` gives them, started once (benchmarks/turns.py).

The sides take turns of a few steps, in changing order, and the other side's ranks are stopped meanwhile. A turn's time
is that of its slowest rank, its CPU time the sum over ranks, per step. The ratio is the median over the rounds of the
revision / this checkout, with the quartiles behind it. Peak memory is the largest resident set of a rank while it
trains, imports included, summed over the ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.turns import COLUMNS, ROOT, cells_of, compare, launcher_environment

RESULTS = harness.RESULTS / "pipeline_step.md"
MICRO_BATCHES, ROWS, SEQUENCE = 8, 2, 64
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class TimedLayout:
    """A model on a layout."""

    name: str
    hidden_size: int
    dtype: str
    tensor_parallel_size: int = 1

    @property
    def ranks(self) -> int:
        return 2 * self.tensor_parallel_size


CASES = [
    *(
        TimedLayout(f"{size} {dtype} pp2", hidden, dtype)
        for size, hidden in (("small", 64), ("medium", 512))
        for dtype in ("fp32", "bf16")
    ),
    TimedLayout("small fp32 tp2 pp2", 64, "fp32", tensor_parallel_size=2),
]


def stepper(name: str) -> Callable[[], float]:
    """Builds one rank of a case, in a process of benchmarks/turns.py."""
    from megalite.config import resolve_layout
    from megalite.engine.build import build_engine
    from megalite.engine.deepspeed.process_groups import start_distributed
    from models.decoder import decoder_layers

    case = next(case for case in CASES if case.name == name)
    model = {
        "vocab_size": 1024,
        "hidden_size": case.hidden_size,
        "intermediate_size": 11 * case.hidden_size // 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": SEQUENCE,
    }
    config = harness.config_of(
        model,
        MICRO_BATCHES * ROWS,
        SEQUENCE,
        micro_batch=ROWS,
        parallel={"pipeline_parallel_size": 2, "tensor_parallel_size": case.tensor_parallel_size},
        precision={"dtype": case.dtype},
    )
    start_distributed(int(os.environ["LOCAL_RANK"]))
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, case.ranks, "cpu"))
    draw = np.random.default_rng(0)

    def step() -> float:
        batches = harness.random_batches(draw, 1024, (MICRO_BATCHES, ROWS, SEQUENCE))
        return float(engine.train_step(batches if engine.needs_data else [], LEARNING_RATE).loss)

    return step


def rows(case: TimedLayout, other: Path, options: argparse.Namespace) -> list[str]:
    """Returns the table's rows of a case: the other tree's, then this checkout's."""
    trees = {"the revision": other, "this checkout": ROOT}
    words = dict.fromkeys(trees, ("benchmarks/pipeline_step.py", "stepper", case.name))
    environment = dict.fromkeys(trees, launcher_environment(case.ranks))
    taken = compare(words, case.ranks, options.rounds, options.steps, environment=environment, tree=trees)
    first = taken["the revision"]
    return [harness.row([case.name, side, *cells_of(first, own), f"{own[-1].loss:.7f}"]) for side, own in taken.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD", help="revision to compare with, as in HEAD~1")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case; the results file stays")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which both sides have their turn")
    parser.add_argument("--steps", type=int, default=3, help="training steps of a turn")
    options = parser.parse_args()
    load, table = harness.Load(), []
    with harness.tree_of(options.revision) as other:
        for case in CASES:
            if options.only in (None, case.name):
                table += rows(case, other, options)
                print(*table[-2:], sep="\n", flush=True)
    page = harness.page(
        "A pipelined training step, against the revision before",
        f"benchmarks.pipeline_step {options.revision}",
        f"{harness.machine('torch', 'deepspeed')}. {load} {options.rounds} rounds of {options.steps} steps a side.",
        *harness.header("case", "side", *COLUMNS, words=2),
        *table,
    )
    harness.show(page, RESULTS, renews=not options.only)


if __name__ == "__main__":
    main()
