"""The same Llama trained by megalite and by others, on one process and on two: time, CPU time, memory and last loss.

    python -m benchmarks.peers                                  # everything; writes benchmarks/results/peers.md
    python -m benchmarks.peers --layouts one dp2 --rounds 3     # a look, printed only
    python -m benchmarks.peers --sides plain megalite           # installs nothing

Sides: `plain` is transformers with torch's own DistributedDataParallel, DTensor and pipelining; `accelerate` is the
same under Hugging Face Accelerate, which is installed into build/peers, an environment that sees ours. What does not
install, import or run is named on the page with its reason. Others have no side. torchtitan 0.3.0 does not train on a
CPU: it imports triton and takes flex or variable-length attention alone, which have no backward there. litgpt wants an
older huggingface-hub than transformers 5. nanotron and Megatron-core are written for GPUs, and nobody has tried them
here.

Equal on all sides: initial weights, tokens, fp32, AdamW without decay, clipping at 1.0, threads. Not equal: megalite
keeps optimizer state by ZeRO-1 on a DeepSpeed engine, in the environment that `megalite train` gives its ranks, and has
the head's loss in chunks; DistributedDataParallel keeps whole state. pp2 has micro-batches of one sequence.

The sides take turns of a few steps, and whose turn it is not is stopped (SIGSTOP: its threads may spin). A ratio is the
median over the rounds of the other side / megalite, so that what else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.peer_sides import LAYOUTS, SIDES, ranks_of
from benchmarks.train_step import launcher_environment
from launch.runtime.local_ranks import free_port

RESULTS = harness.RESULTS / "peers.md"
ENVIRONMENTS = harness.ROOT / "build" / "peers"
PACKAGES = {"accelerate": ["accelerate"]}  # sides that are no dependency of ours
SERVED = {"plain": LAYOUTS, "megalite": LAYOUTS, "accelerate": ("one", "dp2")}
OURS = "megalite"
POLL_S = 0.5
SAME_LOSS = 1e-3  # nats: fp32 sums in other orders; another model, other data or another optimizer is far beyond


class CannotRun(Exception):
    """A side that does not install, import or train here, and why."""


@dataclass(frozen=True)
class PeerTurn:
    """Measurements of all ranks of a side in one turn, per step."""

    wall_s: float  # of the slowest rank
    cpu_s: float  # of all ranks, as the memory
    memory_mib: float  # peak resident sets so far, with what imports take
    loss: float  # of the last step

    @classmethod
    def of(cls, ranks: Sequence[dict[str, float]]) -> PeerTurn:
        """Unites the answers of the ranks of a side."""
        cpu_s, memory_mib = (sum(rank[key] for rank in ranks) for key in ("cpu_s", "memory_mib"))
        return cls(max(rank["wall_s"] for rank in ranks), cpu_s, memory_mib, ranks[0]["loss"])


class PeerRanks:
    """The ranks of one side, which train when told to and are stopped otherwise."""

    def __init__(self, side: str, layout: str, python: str) -> None:
        count = ranks_of(layout)
        inherited = ("OMP_", "GOMP_", "GLIBC_", "MALLOC_")
        shared = {key: value for key, value in os.environ.items() if not key.startswith(inherited)}
        if side == OURS:
            shared |= launcher_environment(count)
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        shared |= {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(harness.ROOT)}
        shared |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the ranks
        self._ranks = [
            subprocess.Popen(
                [python, "-m", "benchmarks.peer_sides", side, layout],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=harness.ROOT,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            self._answers()  # built and warm
        except CannotRun:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def turn(self, steps: int) -> PeerTurn:
        """Trains `steps` steps while the others are stopped."""
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            assert rank.stdin is not None
            with suppress(BrokenPipeError):  # it has died, which is told with its reason below
                print(steps, file=rank.stdin, flush=True)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return PeerTurn.of(answers)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.send_signal(number)

    def _answers(self) -> list[Any]:
        """Returns a line of each rank. Raises CannotRun as soon as one has died, for which the others may wait."""
        answers = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            while not select.select([rank.stdout], [], [], POLL_S)[0]:
                dead = next((other for other, one in enumerate(self._ranks) if one.poll() is not None), None)
                if dead is not None:
                    raise CannotRun(self._reason(dead))
            line = rank.stdout.readline()
            if not line:
                raise CannotRun(self._reason(number))
            answers.append(json.loads(line))
        return answers

    def _reason(self, rank: int) -> str:
        self._errors.seek(0)
        return f"rank {rank} died: {reason_in(self._errors.read())}"


def reason_in(text: str) -> str:
    """Returns the sentence of a Python error in what a process has written: its last line that names one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "ERROR", "Interrupt"))]
    return (errors or lines or ["it died without a word"])[-1][:200]


def python_of(side: str) -> str:
    """Returns the Python of a side and installs a peer that is not there. Raises CannotRun."""
    if side not in PACKAGES:
        return sys.executable
    folder = ENVIRONMENTS / side
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        say(f"installing {' and '.join(PACKAGES[side])} into {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        inside = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (inside / "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # the same torch and transformers
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[side]]
        if (failed := subprocess.run(pip, capture_output=True, text=True, check=False)).returncode:
            raise CannotRun(f"pip cannot install it: {reason_in(failed.stderr)}")
        done.touch()
    return str(python)


def compare(layout: str, sides: Sequence[str], rounds: int, steps: int) -> tuple[dict[str, list[PeerTurn]], list[str]]:
    """Returns every side's turns, taken round by round, and why the others have none."""
    running: dict[str, PeerRanks] = {}
    missing: list[str] = []
    try:
        for side in sides:
            say(f"{layout}: starting {side}")
            try:
                running[side] = PeerRanks(side, layout, python_of(side))
            except CannotRun as error:
                missing.append(f"{side}, {layout}: {error}")
                say(missing[-1])
        taken: dict[str, list[PeerTurn]] = {side: [] for side in running}
        for number in range(rounds):
            for side, ranks in list(running.items()):
                try:
                    taken[side].append(ranks.turn(steps))
                except CannotRun as error:
                    missing.append(f"{side}, {layout}, in round {number + 1}: {error}")
                    say(missing[-1])
                    running.pop(side).close()
                    del taken[side]
            say(f"{layout}: round {number + 1} of {rounds}")
    finally:
        for ranks in running.values():
            ranks.close()
    return taken, missing


def rows(layout: str, taken: dict[str, list[PeerTurn]]) -> list[str]:
    """Returns the table's rows of one layout; ratios are above 1 where megalite needs less."""
    ours, result = taken[OURS], []
    for side, turns in taken.items():
        pairs = list(zip(turns, ours, strict=True))
        differs = abs(turns[-1].loss - ours[-1].loss)
        cells = [
            layout,
            side,
            f"{1000 * statistics.median(turn.wall_s for turn in turns):.0f}",
            f"{statistics.median(theirs.wall_s / mine.wall_s for theirs, mine in pairs):.2f}x",
            f"{1000 * statistics.median(turn.cpu_s for turn in turns):.0f}",
            f"{statistics.median(theirs.cpu_s / mine.cpu_s for theirs, mine in pairs):.2f}x",
            f"{turns[-1].memory_mib:.0f}",
            f"{turns[-1].loss:.4f}" + (f" (differs by {differs:.1e})" if differs > SAME_LOSS else ""),
        ]
        result.append(harness.row(cells))
    return result


def report(table: Sequence[str], missing: Sequence[str], options: argparse.Namespace, load: harness.Load) -> str:
    """Returns the page, up to what is written by hand below it."""
    columns = ("ms a step", "by wall time", "CPU ms", "by CPU time", "peak MiB", "last loss")
    return harness.page(
        "The same Llama, megalite and others",
        "benchmarks.peers",
        f"{', '.join([harness.machine('torch', 'deepspeed', 'transformers'), *peer_versions(options.sides)])}. {load} "
        f"Median of {options.rounds} rounds of {options.steps} steps a side. A ratio is the other side's over "
        "megalite's: above 1, megalite needs less.",
        *harness.header("layout", "side", *columns, words=2),
        *table,
        *(["", *(f"- not measured: {one}" for one in missing)] if missing else []),
    )


def peer_versions(sides: Sequence[str]) -> list[str]:
    """Returns the names and versions of installed peers."""
    found = []
    for side in sides:
        if (ENVIRONMENTS / side / "installed").exists():
            code = f"from importlib.metadata import version; print(version({side!r}))"
            python = str(ENVIRONMENTS / side / "bin" / "python")
            found.append(f"{side} {subprocess.check_output([python, '-c', code], text=True).strip()}")
    return found


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="these alone; the page stays as it is")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="megalite is always one")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which every side has its turn")
    parser.add_argument("--steps", type=int, default=2, help="training steps of a turn")
    options = parser.parse_args()
    if min(options.rounds, options.steps) < 1:
        parser.error("--rounds and --steps are at least 1")
    load, table, missing = harness.Load(), [], []
    for layout in options.layouts or LAYOUTS:
        sides = [side for side in SIDES if layout in SERVED[side] and (side == OURS or side in options.sides)]
        taken, without = compare(layout, sides, options.rounds, options.steps)
        missing += without
        if OURS in taken:
            table += rows(layout, taken)
    is_whole = not options.layouts and options.sides == list(SIDES)
    harness.show(report(table, missing, options, load), RESULTS, renews=is_whole)


if __name__ == "__main__":
    main()
