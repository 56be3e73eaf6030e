"""Cost of `training.self_check_every`: the check beside the step that it is part of, in the same processes.

    python -m benchmarks.self_check                          # writes benchmarks/results/self_check.md
    python -m benchmarks.self_check --dtype bf16 --rounds 3  # a look, printed only

Shape: Llama, hidden 512, 10 layers, 8 heads, ffn 1408, vocab 16384 (49 million parameters); two data-parallel ranks
with one core each, one sequence of 256 tokens a rank, ZeRO-1: a short step, which makes the check look expensive.
Every parameter has a copy on the other rank, and all are hashed twice (before and after the update). A round is a step
without the check and one with it. The check's time is what metrics.jsonl calls `self_check_s`; waiting for the other
rank is in it. The last column takes the difference of the two steps instead, with all that the check does to the step
around it. Medians over the rounds, of rank 0.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import harness

RESULTS = harness.RESULTS / "self_check.md"
MODEL = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
RANKS, SEQUENCE = 2, 256
EVERY = 100
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Round:
    """Seconds of a step without the check, of one with it, and of the check."""

    plain_s: float
    checked_s: float
    check_s: float


def train_rank(dtype: str, rounds: int) -> list[Round]:
    """One rank: the same steps as a run's, the check as the loop makes it."""
    import numpy as np

    from megalite.config import resolve_layout
    from megalite.engine.build import build_engine
    from megalite.engine.deepspeed.process_groups import start_distributed
    from megalite.resilience.replica_check import SelfCheck
    from models.decoder import decoder_layers

    config = harness.config_of(MODEL, RANKS, SEQUENCE, precision={"dtype": dtype})
    start_distributed(local_rank=0)
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, RANKS, "cpu"))
    check = SelfCheck(engine)
    draw = np.random.default_rng(engine.coordinate.data_rank)

    def step() -> None:
        batches = harness.random_batches(draw, MODEL["vocab_size"], (1, 1, SEQUENCE))
        float(engine.train_step(batches, 1e-4).loss)

    for _ in range(WARM_UP_STEPS):
        step()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        step()
        between = time.perf_counter()
        check.watch()
        step()
        found, seconds = check.run()
        taken.append(Round(between - started, time.perf_counter() - between, seconds))
        assert not found, found
    return taken


def measure(dtype: str, rounds: int) -> list[Round]:
    """Rank 0's rounds of a run of two ranks, in the environment that `megalite train` gives them."""
    from launch.runtime.local_ranks import free_port, rank_settings
    from megalite.config import LaunchConfig

    shared = rank_settings(LaunchConfig(), ranks=RANKS, on_gpu=False)[0] | {"DS_ACCELERATOR": "cpu"}
    shared |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rounds.json"
        command = [sys.executable, "-m", "benchmarks.self_check", "--dtype", dtype, "--rounds", str(rounds)]
        command += ["--answer", str(answer)]
        ranks = [
            subprocess.Popen(
                command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=harness.ROOT
            )
            for rank in range(RANKS)
        ]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a rank of the benchmark failed; its message is above")
        return [Round(**taken) for taken in json.loads(answer.read_text())]


def row(dtype: str, rounds: list[Round]) -> str:
    """The table's row of one precision."""
    plain, checked, check = (
        statistics.median(seconds) for seconds in zip(*(asdict(r).values() for r in rounds), strict=True)
    )
    ratio = statistics.median(r.check_s / r.plain_s for r in rounds)
    longer = statistics.median(r.checked_s / r.plain_s - 1 for r in rounds)
    cells = [
        dtype,
        *(f"{1000 * s:.0f}" for s in (plain, checked, check)),
        f"{ratio:.2f}",
        f"{100 * ratio / EVERY:.2f} %",
        f"{100 * longer / EVERY:.2f} %",
    ]
    return harness.row(cells)


def report(table: list[str], rounds: int, load: harness.Load) -> str:
    """The results file, up to what is written by hand below it."""
    ratios = ("check / step", f"share at every={EVERY}", "by the longer step")
    return harness.page(
        "What the self-check costs",
        "benchmarks.self_check",
        f"{harness.machine('torch', 'deepspeed')}. {load} The {RANKS} ranks make 2 of it. Median of {rounds} rounds.",
        *harness.header("dtype", "ms a step", "ms a step with check", "ms a check", *ratios),
        *table,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="one precision only; the results file stays")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of steps, without and with the check")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        taken = train_rank(options.dtype, options.rounds)
        if os.environ["RANK"] == "0":
            options.answer.write_text(json.dumps([asdict(r) for r in taken]))
        return
    load = harness.Load()
    dtypes = [options.dtype] if options.dtype else ["fp32", "bf16"]
    table = [row(dtype, measure(dtype, options.rounds)) for dtype in dtypes]
    harness.show(report(table, options.rounds, load), RESULTS, renews=not options.dtype)


if __name__ == "__main__":
    main()
