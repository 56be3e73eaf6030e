"""A training step under a pipeline: this checkout against another revision, in time, CPU time and peak memory.

    python -m benchmarks.pipeline_step REVISION                           # four minutes; writes the results
    python -m benchmarks.pipeline_step REVISION --only "small fp32 pp2"   # a look, printed only

Revision and this checkout train the same random tokens with `build_engine` and `train_step`: Llama, 4 layers, vocab
1024, eight micro-batches of 2 x 64 tokens, 1F1B, ZeRO-1, AdamW; hidden 64 (small) or 512 (medium). Each rank is a
process of one thread in the environment that `megalite train` gives it, started once.

The sides take turns of a few steps, in changing order, and the other side's ranks wait meanwhile for their next turn.
A turn's time is its fastest step's, of rank 0; its CPU time the sum over ranks, per step. The ratio is the median over
the rounds of this checkout / revision, with the quartiles behind it. Peak memory is the largest resident set of a rank
while it trains, imports included, summed over the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time only where results are written: a rank's process has the modules of another revision
    from benchmarks import harness

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "pipeline_step.md"
MICRO_BATCHES, ROWS, SEQUENCE = 8, 2, 64
LEARNING_RATE = 1e-3
TIMES = ("ms before", "ms", "ratio (quartiles)", "CPU ms before", "CPU ms", "ratio (quartiles)")
WARM_UP_STEPS = 3


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


@dataclass(frozen=True)
class RanksTurn:
    """Measurements of all ranks of a side in one turn, per step."""

    wall_s: float
    cpu_s: float
    memory_mib: float
    loss: float  # of the last step


class TreeRanks:
    """The ranks of one tree, which train when told to."""

    def __init__(self, tree: Path, case: TimedLayout) -> None:
        from launch.runtime.local_ranks import free_port, rank_settings
        from megalite.config import LaunchConfig

        shared = os.environ | rank_settings(LaunchConfig(), ranks=case.ranks, on_gpu=False)[0]
        shared |= {"PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, str(Path(__file__)), "--case", case.name]
        self.ranks = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=tree,
                text=True,
            )
            for rank in range(case.ranks)
        ]
        trees = {self._answer(rank) for rank in self.ranks}  # built and warm
        assert trees == {str(tree)}, f"ranks run the code of {trees}, not of {tree}"

    def turn(self, steps: int) -> RanksTurn:
        """Trains `steps` steps."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(steps, file=rank.stdin, flush=True)
        answers = [self._answer(rank) for rank in self.ranks]
        total = {key: sum(answer[key] for answer in answers) for key in ("cpu_s", "memory_mib")}
        return RanksTurn(**total, wall_s=answers[0]["wall_s"], loss=answers[0]["loss"])

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()

    def _answer(self, rank: subprocess.Popen[str]) -> Any:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise SystemExit("a rank of the benchmark died; its message is above")
        return json.loads(line)


def serve(case: TimedLayout) -> None:
    """Answers, in a rank's process, each number of steps on stdin with one line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    from types import SimpleNamespace

    import numpy as np

    import megalite
    from megalite.config import Config, resolve_layout
    from megalite.engine.build import build_engine
    from megalite.engine.deepspeed.process_groups import start_distributed
    from models.decoder import decoder_layers

    config = Config.model_validate(_config(case))
    start_distributed(int(os.environ["LOCAL_RANK"]))
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, case.ranks, "cpu"))
    draw = np.random.default_rng(0)

    def step() -> float:
        tokens = draw.integers(0, config.model.vocab_size, (MICRO_BATCHES, ROWS, SEQUENCE + 1))
        batches = [SimpleNamespace(tokens=rows[:, :-1].copy(), targets=rows[:, 1:].copy()) for rows in tokens]
        for batch in batches:
            batch.positions = batch.sources = batch.global_valid_targets = None
            batch.samples = np.zeros(ROWS, dtype=np.int64)
        result = engine.train_step(batches if engine.needs_data else [], LEARNING_RATE)
        return float(result.loss)

    for _ in range(WARM_UP_STEPS):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest resident set of the start
    print(json.dumps(str(Path(megalite.__path__[0]).parent)), file=answers, flush=True)
    for line in sys.stdin:
        took, cpu_s = [], time.process_time()
        for _ in range(int(line)):
            began = time.perf_counter()
            loss = step()
            took.append(time.perf_counter() - began)
        turn = {
            "wall_s": min(took),
            "cpu_s": (time.process_time() - cpu_s) / len(took),
            "memory_mib": peak_mib(),
            "loss": loss,
        }
        print(json.dumps(turn), file=answers, flush=True)


def peak_mib() -> float:
    """Returns the largest resident set since clear_refs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def _config(case: TimedLayout) -> dict[str, Any]:
    return {
        "run_dir": tempfile.gettempdir(),
        "model": {
            "vocab_size": 1024,
            "hidden_size": case.hidden_size,
            "intermediate_size": 11 * case.hidden_size // 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "max_position_embeddings": SEQUENCE,
        },
        "data": {"path": "unused"},
        "parallel": {"pipeline_parallel_size": 2, "tensor_parallel_size": case.tensor_parallel_size},
        "precision": {"dtype": case.dtype},
        "training": {
            "global_batch_size": MICRO_BATCHES * ROWS,
            "micro_batch_size": ROWS,
            "sequence_length": SEQUENCE,
            "steps": 1,
        },
    }


def compare(case: TimedLayout, other: Path, rounds: int, steps: int) -> tuple[list[RanksTurn], list[RanksTurn]]:
    """Returns the turns of this checkout and of the other tree, round by round."""
    sides = [TreeRanks(ROOT, case), TreeRanks(other, case)]
    taken: tuple[list[RanksTurn], list[RanksTurn]] = ([], [])
    try:
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                taken[which].append(sides[which].turn(steps))
    finally:
        for side in sides:
            side.close()
    return taken


def row(case: TimedLayout, mine: list[RanksTurn], others: list[RanksTurn]) -> str:
    """Returns the table's row of a case."""
    from benchmarks import harness

    cells = [case.name]
    for field in ("wall_s", "cpu_s"):
        ratios = [getattr(a, field) / getattr(b, field) for a, b in zip(mine, others, strict=True)]
        medians = [1000 * statistics.median(getattr(turn, field) for turn in turns) for turns in (others, mine)]
        cells += [f"{medians[0]:.1f}", f"{medians[1]:.1f}", harness.quartiles(ratios, 3)]
    peaks = [turns[-1].memory_mib for turns in (others, mine)]
    cells += [f"{peaks[0]:.0f}", f"{peaks[1]:.0f}", f"{peaks[1] / peaks[0]:.3f}"]
    cells.append(f"{abs(mine[-1].loss - others[-1].loss):.1e}")
    return harness.row(cells)


def report(table: list[str], options: argparse.Namespace, load: harness.Load) -> str:
    """Returns the results file, up to what is written by hand below it."""
    from benchmarks import harness

    return harness.page(
        "A pipelined training step, against the revision before",
        f"benchmarks.pipeline_step {options.revision}",
        f"{harness.machine('torch', 'deepspeed')}. {load} Median of {options.rounds} rounds of {options.steps} steps a "
        "side.",
        *harness.header("case", *TIMES, "peak MiB before", "peak MiB", "ratio", "losses differ by"),
        *table,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD", help="revision to compare with, as in HEAD~1")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case; the results file stays")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which both sides have their turn")
    parser.add_argument("--steps", type=int, default=3, help="training steps of a turn")
    parser.add_argument("--case", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        serve(next(case for case in CASES if case.name == options.case))
        return
    from benchmarks import harness

    load, table = harness.Load(), []
    with harness.tree_of(options.revision) as other:
        for case in CASES:
            if options.only in (None, case.name):
                table.append(row(case, *compare(case, other, options.rounds, options.steps)))
                print(table[-1], flush=True)
    harness.show(report(table, options, load), RESULTS, renews=not options.only)


if __name__ == "__main__":
    main()
