"""One training step, megalite against a plain PyTorch loop: time, CPU time and peak memory, as ratios of one run.

    python -m benchmarks.train_step                         # both precisions; writes benchmarks/results/train_step.md
    python -m benchmarks.train_step --dtype bf16 --turns 5  # a look, printed only
    python -m benchmarks.train_step --against HEAD~1        # this checkout and a revision of it; printed only

Shape: Llama, hidden 384, 8 layers, 6 heads, 2 kv heads, ffn 1024, vocab 8192; 4 sequences of 256 tokens a step. One
process and all cores this process may use, per side:

- megalite: `build_engine` and `train_step`, ZeRO-1 on a DeepSpeed engine, as a user's run of world size one, once in
  the environment that `megalite train` gives its ranks and once in a bare one;
- plain: transformers' LlamaForCausalLM (sdpa), `clip_grad_norm_`, torch.optim.AdamW, both as they come, in a bare
  environment. Its bf16 is a bf16 model with bf16 moments; megalite keeps fp32 weights and accumulates in fp32 besides;
- with `--against`, the revision's megalite, in a worktree of its own with the same packages; ratios are then those of
  the revision to this checkout, and exit code 1 says that one by wall or CPU time is below 0.99.

The sides take turns of a few steps, and the one whose turn it is not is stopped (SIGSTOP: its threads may spin).
A ratio is the median over the rounds of plain / megalite, so that what else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results" / "train_step.md"
BEFORE = "megalite, the revision"
LEAST_RATIO = 0.99  # of a revision to this checkout
SIDES = ("plain", "megalite", "megalite, bare environment")
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
BATCH, SEQUENCE = 4, 256
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Turn:
    """Measurements of one side in one turn, per step."""

    wall_s: float
    cpu_s: float
    memory_mib: float  # peak so far, above what the imports had taken
    loss: float  # of the turn's last step


class Side:
    """A process that trains when told to and is stopped otherwise."""

    def __init__(self, name: str, dtype: str, threads: int, tree: Path = ROOT) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "GLIBC_", "MALLOC_"))}
        if name in ("megalite", BEFORE):
            environment |= launcher_environment()
        environment |= {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(tree)}
        side = "plain" if name == "plain" else "megalite"
        command = [sys.executable, __file__, "--side", side, "--dtype", dtype, "--tree", str(tree)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._answer()  # built and warm
        self.process.send_signal(signal.SIGSTOP)

    def turn(self, steps: int) -> Turn:
        """Trains `steps` steps while the others are stopped."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n".encode())
        self.process.stdin.flush()
        self.process.send_signal(signal.SIGCONT)
        answer = self._answer()
        self.process.send_signal(signal.SIGSTOP)
        return Turn(**answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a side of the benchmark died; its message is above")
        return json.loads(line)


def launcher_environment(ranks: int = 1) -> dict[str, str]:
    """Returns the environment that `megalite train` sets for each of so many CPU ranks."""
    from launch.runtime.local_ranks import rank_settings
    from megalite.config import LaunchConfig

    return rank_settings(LaunchConfig(), ranks=ranks, on_gpu=False)[0]


def serve(side: str, dtype: str, tree: Path) -> None:
    """A side's process: builds, warms up, then answers each number of steps on stdin with one line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    importlib.import_module("torch._dynamo")  # torch.optim does so at its first use: memory of neither side's steps
    step, imports_kib = (plain_loop if side == "plain" else megalite_engine)(dtype)
    imported = sys.modules.get("megalite")
    assert imported is None or Path(imported.__path__[0]).parent == tree, f"{imported} is not that of {tree}"
    for _ in range(WARM_UP_STEPS):
        loss = step()
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        steps = int(line)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step()
        turn = {
            "wall_s": (time.perf_counter() - wall) / steps,
            "cpu_s": (time.process_time() - cpu) / steps,
            "memory_mib": (peak_kib() - imports_kib) / 1024,
            "loss": loss,
        }
        print(json.dumps(turn), file=answers, flush=True)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def batches() -> Callable[[], tuple[Any, Any]]:
    """The same random tokens for both sides: (tokens, next tokens), int64 `[batch, seq]`."""
    import numpy as np

    draw = np.random.default_rng(0)

    def batch() -> tuple[Any, Any]:
        tokens = draw.integers(0, MODEL["vocab_size"], (BATCH, SEQUENCE + 1))
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

    return batch


def plain_loop(dtype: str) -> tuple[Callable[[], float], int]:
    """The loop most people write; the imports' memory beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    imports_kib = peak_kib()
    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, attn_implementation="sdpa", tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    next_batch = batches()

    def step() -> float:
        tokens, targets = (torch.from_numpy(array) for array in next_batch())
        loss = model(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, imports_kib


def megalite_engine(dtype: str) -> tuple[Callable[[], float], int]:
    """One rank of a run, as launch/train.py builds it; the imports' memory beside it."""
    from types import SimpleNamespace

    from megalite.config import Config, resolve_layout
    from megalite.engine.build import build_engine
    from megalite.engine.deepspeed.process_groups import start_distributed
    from models.decoder import decoder_layers

    imports_kib = peak_kib()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    config = Config.model_validate(
        {
            "run_dir": tempfile.gettempdir(),
            "model": MODEL,
            "data": {"path": "unused"},
            "precision": {"dtype": dtype},
            "optimizer": {"learning_rate": LEARNING_RATE, "betas": (0.9, 0.999), "weight_decay": 0.01},
            "training": {
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH,
                "sequence_length": SEQUENCE,
                "steps": 1,
                "gradient_clipping": 1.0,
            },
        }
    )
    start_distributed(local_rank=0)
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, 1, "cpu"))
    next_batch = batches()

    def step() -> float:
        tokens, targets = next_batch()
        absent = dict.fromkeys(("positions", "samples", "sources", "global_valid_targets"))
        batch = SimpleNamespace(tokens=tokens, targets=targets, **absent)
        return float(engine.train_step([batch], LEARNING_RATE).loss)

    return step, imports_kib


def compare(dtype: str, turns: int, steps: int, threads: int, trees: dict[str, Path]) -> dict[str, list[Turn]]:
    """Every side's turns, taken round by round; `trees` has the checkout of each."""
    sides = {name: Side(name, dtype, threads, tree) for name, tree in trees.items()}
    taken: dict[str, list[Turn]] = {name: [] for name in sides}
    try:
        for _ in range(turns):
            for name, side in sides.items():
                taken[name].append(side.turn(steps))
    finally:
        for side in sides.values():
            side.close()
    return taken


def rows(dtype: str, taken: dict[str, list[Turn]]) -> list[str]:
    """The table's rows of one precision: ratios are those of the first side to the others."""
    result, first = [], next(iter(taken.values()))
    for name, own in taken.items():
        pairs = list(zip(first, own, strict=True))
        cells = [
            dtype,
            name,
            f"{1000 * statistics.median(turn.wall_s for turn in own):.0f}",
            f"{statistics.median(plain.wall_s / turn.wall_s for plain, turn in pairs):.2f}x",
            f"{1000 * statistics.median(turn.cpu_s for turn in own):.0f}",
            f"{statistics.median(plain.cpu_s / turn.cpu_s for plain, turn in pairs):.2f}x",
            f"{own[-1].memory_mib:.0f}",
            f"{own[-1].loss:.3f}",
        ]
        result.append(f"| {' | '.join(cells)} |")
    return result


def least_ratio(before: list[Turn], here: list[Turn]) -> float:
    """Returns the smaller of the median ratios by wall and CPU time of a revision to this checkout."""
    pairs = list(zip(before, here, strict=True))
    return min(
        statistics.median(one.wall_s / two.wall_s for one, two in pairs),
        statistics.median(one.cpu_s / two.cpu_s for one, two in pairs),
    )


def against(revision: str, dtypes: list[str], options: argparse.Namespace, threads: int) -> bool:
    """Prints this checkout beside a revision of it; returns whether it is nowhere slower."""
    from benchmarks.harness import tree_of

    least = []
    with tree_of(revision) as tree:
        for dtype in dtypes:
            taken = compare(dtype, options.turns, options.steps, threads, {BEFORE: tree, "megalite": ROOT})
            print("\n".join(rows(dtype, taken)), flush=True)
            least.append(least_ratio(*taken.values()))
    print(f"least ratio of {revision} to this checkout: {min(least):.3f}, to be {LEAST_RATIO} at least")
    return min(least) >= LEAST_RATIO


def report(table: list[str], turns: int, steps: int, threads: int) -> str:
    """The results file, up to what is written by hand below it."""
    from benchmarks.harness import header, machine, page

    return page(
        "One training step: megalite against a plain PyTorch loop",
        "benchmarks.train_step",
        f"{machine('torch', 'deepspeed', 'transformers')}, glibc {platform.libc_ver()[1]}. {threads} threads; median "
        f"of {turns} rounds of {steps} steps a side.",
        *header("dtype", "side", "ms a step", "speed", "CPU ms", "by CPU time", "peak MiB", "last loss", words=2),
        *table,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="one precision only; the results file stays")
    parser.add_argument("--turns", type=int, default=25, help="rounds in which every side has its turn")
    parser.add_argument("--steps", type=int, default=2, help="training steps of a turn")
    parser.add_argument("--against", metavar="REVISION", help="compare with a revision instead; the results file stays")
    parser.add_argument("--side", choices=("plain", "megalite"), help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, options.dtype, options.tree)
        return
    threads = len(os.sched_getaffinity(0))
    table, dtypes = [], [options.dtype] if options.dtype else ["fp32", "bf16"]
    if options.against:
        sys.exit(0 if against(options.against, dtypes, options, threads) else 1)
    for dtype in dtypes:
        table += rows(dtype, compare(dtype, options.turns, options.steps, threads, dict.fromkeys(SIDES, ROOT)))
    from benchmarks.harness import show

    show(report(table, options.turns, options.steps, threads), RESULTS, renews=not options.dtype)


if __name__ == "__main__":
    main()
