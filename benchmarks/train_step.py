"""One training step, megalite against a plain PyTorch loop: time, CPU time and peak memory, as ratios of one run.

    python -m benchmarks.train_step                         # both precisions; writes benchmarks/results/train_step.md
    python -m benchmarks.train_step --dtype bf16 --turns 5  # a look, printed only
    python -m benchmarks.train_step --against HEAD~1        # this checkout and a revision of it; printed only

Shape: Llama, hidden 384, 8 layers, 6 heads, 2 kv heads, ffn 1024, vocab 8192; 4 sequences of 256 tokens a step. One
process and all cores this process may use, per side (benchmarks/peer_sides.py):

- megalite: `build_engine` and `train_step`, ZeRO-1 on a DeepSpeed engine, as a user's run of world size one, once in
  the environment that `megalite train` gives its ranks and once in a bare one;
- plain: transformers' LlamaForCausalLM (sdpa), `clip_grad_norm_`, torch.optim.AdamW, both as they come, in a bare
  environment. Its bf16 is a bf16 model with bf16 moments; megalite keeps fp32 weights and accumulates in fp32 besides;
- with `--against`, the revision's megalite, in a worktree of its own with the same packages; ratios are then those of
  the revision to this checkout, and exit code 1 says that one by wall or CPU time is below 0.99.

The sides take turns of a few steps, and the one whose turn it is not is stopped (SIGSTOP: its threads may spin).
A ratio is the median over the rounds of plain / megalite, so that what else the machine does hits both alike. Peak
memory is with imports.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from pathlib import Path

from benchmarks import harness
from benchmarks.turns import COLUMNS, ROOT, SideTurn, cells_of, compare, launcher_environment, ratios

RESULTS = harness.RESULTS / "train_step.md"
BEFORE = "megalite, the revision"
LEAST_RATIO = 0.99  # of a revision to this checkout
SIDES = ("plain", "megalite", "megalite, bare environment")


def measure(dtype: str, options: argparse.Namespace, trees: dict[str, Path]) -> dict[str, list[SideTurn]]:
    """Returns the turns of the sides that `trees` has the checkouts of."""
    functions = {name: "plain" if name == "plain" else "megalite" for name in trees}
    words = {name: ("benchmarks/peer_sides.py", function, "one", dtype) for name, function in functions.items()}
    environment = {name: launcher_environment() if name in ("megalite", BEFORE) else {} for name in trees}
    return compare(words, 1, options.turns, options.steps, environment=environment, tree=trees)


def rows(dtype: str, taken: dict[str, list[SideTurn]]) -> list[str]:
    """The table's rows of one precision: ratios are those of the first side to the others."""
    first = next(iter(taken.values()))
    return [harness.row([dtype, name, *cells_of(first, own), f"{own[-1].loss:.3f}"]) for name, own in taken.items()]


def least_ratio(before: list[SideTurn], here: list[SideTurn]) -> float:
    """Returns the smaller of the median ratios by wall and CPU time of a revision to this checkout."""
    return min(statistics.median(ratios(field, before, here)) for field in ("wall_s", "cpu_s"))


def against(revision: str, dtypes: list[str], options: argparse.Namespace) -> bool:
    """Prints this checkout beside a revision of it; returns whether it is nowhere slower."""
    least = []
    with harness.tree_of(revision) as tree:
        for dtype in dtypes:
            taken = measure(dtype, options, {BEFORE: tree, "megalite": ROOT})
            print("\n".join(rows(dtype, taken)), flush=True)
            least.append(least_ratio(*taken.values()))
    print(f"least ratio of {revision} to this checkout: {min(least):.3f}, to be {LEAST_RATIO} at least")
    return min(least) >= LEAST_RATIO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="one precision only; the results file stays")
    parser.add_argument("--turns", type=int, default=25, help="rounds in which every side has its turn")
    parser.add_argument("--steps", type=int, default=2, help="training steps of a turn")
    parser.add_argument("--against", metavar="REVISION", help="compare with a revision instead; the results file stays")
    options = parser.parse_args()
    table, dtypes = [], [options.dtype] if options.dtype else ["fp32", "bf16"]
    if options.against:
        sys.exit(0 if against(options.against, dtypes, options) else 1)
    for dtype in dtypes:
        table += rows(dtype, measure(dtype, options, dict.fromkeys(SIDES, ROOT)))
    page = harness.page(
        "One training step: megalite against a plain PyTorch loop",
        "benchmarks.train_step",
        f"{harness.machine('torch', 'deepspeed', 'transformers')}, glibc {platform.libc_ver()[1]}. "
        f"{len(os.sched_getaffinity(0))} threads; median of {options.turns} rounds of {options.steps} steps a side.",
        *harness.header("dtype", "side", *COLUMNS, words=2),
        *table,
    )
    harness.show(page, RESULTS, renews=not options.dtype)


if __name__ == "__main__":
    main()
