"""The same Llama trained by megalite and by other stacks, on one, two and four processes: time, CPU time, memory, loss.

    python -m benchmarks.peers                                        # everything; writes benchmarks/results/peers.md
    python -m benchmarks.peers --layouts one --sides plain megalite   # a look, printed only

torchtitan, Megatron-core and OLMo-core are installed into build/peers, each into an environment of its own that sees
our torch (docs/benchmarking.md). What does not install, import or run is named on the page with its reason.

Equal on all sides: initial weights, tokens, fp32, AdamW without decay, clipping at 1.0, threads; a side whose last loss
is another one says so. Not equal: megalite keeps optimizer state by ZeRO on a DeepSpeed engine, in the environment that
`megalite train` gives its ranks, and has the head's loss in chunks; `megalite train` is the whole loop at its defaults,
and `megalite, bare` the engine without that environment. DistributedDataParallel keeps whole state. Stages of a
pipeline have micro-batches of one sequence under 1F1B, one64 has 64 of 32 tokens on one process.

The sides take turns of a few steps, in changing order, and whose turn it is not is stopped (SIGSTOP: its threads may
spin). A ratio is that of the layout's first side / the side, the median over the rounds with the quartiles, so that
what else the machine does hits both alike. Beside other work `taskset -c 0` tells more: one thread waits for none.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.peer_sides import LAYOUTS
from benchmarks.turns import (
    COLUMNS,
    CannotRun,
    RanksOfSide,
    SideTurn,
    cells_of,
    launcher_environment,
    reason_in,
    take_turns,
)

RESULTS = harness.RESULTS / "peers.md"
ENVIRONMENTS = harness.ROOT / "build" / "peers"
# words for pip of sides that are no dependency of ours; torch is never among what they bring
TITAN = ("torchdata", "torch_checkpointing", "spmd_types==0.2.3", "einops", "tyro", "shtab", "docstring-parser")
PACKAGES = {
    "torchtitan": ["--no-deps", "torchtitan==0.2.2", "triton==3.7.1", *TITAN],
    "megatron-core": ["--no-deps", "megatron-core==0.16.1"],
    "ai2-olmo-core": ["ai2-olmo-core==3.0.0"],
}
SAME_LOSS = 1e-3  # nats: fp32 sums in other orders; another model, other data or another optimizer is far beyond


@dataclass(frozen=True)
class PeerSide:
    """A side, and the layouts that it is asked for, in which it may fail."""

    function: str
    layouts: str
    file: str = "benchmarks/peer_sides.py"
    package: str = ""  # of PACKAGES
    is_launched: bool = False  # in the environment that `megalite train` gives its ranks


STACKS = "benchmarks/peer_stacks.py"
SIDES = {  # the first of a layout is what the others are compared with
    "plain": PeerSide("plain", "one one64 dp2 tp2 pp2"),
    "FSDP2": PeerSide("fsdp2", "dp2z2 dp4z2", STACKS),
    "torchtitan": PeerSide("torchtitan", "one dp2z2 tp2 pp2 dp2tp2 tp2pp2", STACKS, "torchtitan"),
    "megalite train": PeerSide("megalite_train", "one", is_launched=True),
    "megalite": PeerSide("megalite", " ".join(LAYOUTS), is_launched=True),
    "megalite, bare": PeerSide("megalite", "one"),
    "accelerate": PeerSide("accelerate", "one dp2", STACKS),
    "DeepSpeed": PeerSide("deepspeed", "one dp2 dp2z2 dp4z2", STACKS),
    "OLMo-core": PeerSide("olmo", "one dp2 dp2z2 tp2 pp2 dp2tp2 tp2pp2", STACKS, "ai2-olmo-core"),
    "megatron-core": PeerSide("megatron", "one dp2 tp2 pp2 dp2tp2", STACKS, "megatron-core"),
}


def python_of(package: str) -> str:
    """Returns the Python of a side and installs a peer that is not there. Raises CannotRun."""
    if not package:
        return sys.executable
    folder = ENVIRONMENTS / package
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        say(f"installing {package} into {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        inside = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (inside / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # the same torch and transformers
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[package]]
        if (failed := subprocess.run(pip, capture_output=True, text=True, check=False)).returncode:
            raise CannotRun(f"pip cannot install it: {reason_in(failed.stderr)}")
        done.touch()
    return str(python)


def compare(layout: str, sides: Sequence[str], rounds: int, steps: int) -> tuple[dict[str, list[SideTurn]], list[str]]:
    """Returns every side's turns, taken round by round, and why the others have none."""
    running: dict[str, RanksOfSide] = {}
    missing: list[str] = []

    def drop(side: str, error: CannotRun) -> None:
        missing.append(f"{side}, {layout}: {error}")
        say(missing[-1])
        if side in running:
            running.pop(side).close()

    with tempfile.TemporaryDirectory() as folder:
        try:
            for side in sides:
                say(f"{layout}: starting {side}")
                try:
                    of, ranks = SIDES[side], LAYOUTS[layout].ranks
                    environment = {"BENCHMARK_FOLDER": folder} | (launcher_environment(ranks) if of.is_launched else {})
                    words = (of.file, of.function, layout)
                    running[side] = RanksOfSide(words, ranks, python=python_of(of.package), environment=environment)
                except CannotRun as error:
                    drop(side, error)
            return take_turns(running, rounds, steps, drop), missing
        finally:
            for side_ranks in running.values():
                side_ranks.close()


def rows(layout: str, taken: dict[str, list[SideTurn]]) -> list[str]:
    """Returns the table's rows of one layout; ratios are above 1 where a side needs less than the first."""
    first, result = next(iter(taken.values())), []
    for side, turns in taken.items():
        differs = abs(turns[-1].loss - first[-1].loss)
        loss = f"{turns[-1].loss:.4f}" + (f" (differs by {differs:.1e})" if differs > SAME_LOSS else "")
        result.append(harness.row([layout, side, *cells_of(first, turns), loss]))
    return result


def report(table: Sequence[str], missing: Sequence[str], options: argparse.Namespace, load: harness.Load) -> str:
    """Returns the page, up to what is written by hand below it."""
    pins = [word.replace("==", " ") for name, words in PACKAGES.items() for word in words if word.startswith(name)]
    versions = [harness.machine("torch", "deepspeed", "transformers", "accelerate"), *pins]
    return harness.page(
        "The same Llama, megalite and others",
        "benchmarks.peers",
        f"{', '.join(versions)}. {load} {options.rounds} rounds of {options.steps} steps a side. A ratio is that of "
        "the layout's first side over the side's: above 1, it needs less.",
        *harness.header("layout", "side", *COLUMNS, words=2),
        *table,
        *(["", "Did not run:", "", *(f"- {one}" for one in missing)] if missing else []),
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="these alone; the page stays as it is")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="these alone")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which every side has its turn")
    parser.add_argument("--steps", type=int, default=2, help="training steps of a turn")
    options = parser.parse_args()
    if options.rounds < 2 or options.steps < 1:
        parser.error("--rounds is at least 2, --steps 1")
    load, table, missing = harness.Load(), [], []
    for layout in options.layouts or LAYOUTS:
        sides = [side for side in SIDES if layout in SIDES[side].layouts.split() and side in options.sides]
        taken, without = compare(layout, sides, options.rounds, options.steps)
        missing += without
        if taken:
            table += rows(layout, taken)
    is_whole = not options.layouts and options.sides == list(SIDES)
    harness.show(report(table, missing, options, load), RESULTS, renews=is_whole)


if __name__ == "__main__":
    main()
