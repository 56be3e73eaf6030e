"""Sides of a comparison in turns: processes that train when told to, and are stopped otherwise: threads may spin.

    python benchmarks/turns.py benchmarks/peer_sides.py plain dp2   # one rank of a side; `RanksOfSide` starts them all

A side is a function of a file here that takes words and returns its step, which returns the loss; or, if it has a loop
of its own, a function that takes `TurnAnswers`, which says how many steps are wanted next. Ranks of a side train with
the megalite of its tree, which may be another revision's, and with the benchmarks of this one.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INHERITED = ("OMP_", "GOMP_", "GLIBC_", "MALLOC_")
POLL_S = 0.5
WARM_UP_STEPS = 3
COLUMNS = ("ms a step", "by wall time (quartiles)", "CPU ms", "by CPU time (quartiles)", "peak MiB", "last loss")


class CannotRun(Exception):
    """A side that does not install, import or train here, and why."""


@dataclass(frozen=True)
class SideTurn:
    """Measurements of all ranks of a side in one turn, per step."""

    wall_s: float  # of the slowest rank
    cpu_s: float  # of all ranks, as the memory
    memory_mib: float  # peak resident sets since the first steps, with what imports take
    loss: float  # of the last step

    @classmethod
    def of(cls, ranks: Sequence[dict[str, float]]) -> SideTurn:
        """Unites the answers of the ranks of a side."""
        cpu_s, memory_mib = (sum(rank[key] for rank in ranks) for key in ("cpu_s", "memory_mib"))
        return cls(max(rank["wall_s"] for rank in ranks), cpu_s, memory_mib, ranks[0]["loss"])


class RanksOfSide:
    """The ranks of one side. `environment` is what its launcher sets beside what ranks find out about each other."""

    def __init__(
        self,
        words: Sequence[str],
        count: int,
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        tree: Path = ROOT,
    ) -> None:
        from launch.runtime.local_ranks import free_port

        shared = {key: value for key, value in os.environ.items() if not key.startswith(INHERITED)}
        shared |= environment or {}
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        shared |= {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(tree)}
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the ranks
        self._ranks = [
            subprocess.Popen(
                [python, __file__, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=tree,
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

    def turn(self, steps: int) -> SideTurn:
        """Trains `steps` steps while the others are stopped."""
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            assert rank.stdin is not None
            with suppress(BrokenPipeError):  # it has died, which is told with its reason below
                print(steps, file=rank.stdin, flush=True)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return SideTurn.of(answers)

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


def compare(
    words: Mapping[str, Sequence[str]], count: int, rounds: int, steps: int, **of: Any
) -> dict[str, list[SideTurn]]:
    """Returns the turns of sides of so many ranks each; of what else `RanksOfSide` takes, each has its own in `of`."""
    running: dict[str, RanksOfSide] = {}
    try:
        for side in words:
            options = {option: values[side] for option, values in of.items()}
            running[side] = RanksOfSide(words[side], count, **options)
        return take_turns(running, rounds, steps)
    finally:
        for ranks in running.values():
            ranks.close()


def take_turns(
    running: dict[str, RanksOfSide],
    rounds: int,
    steps: int,
    drop: Callable[[str, CannotRun], None] | None = None,
) -> dict[str, list[SideTurn]]:
    """Returns the turns of the sides, round by round, in changing order. A side that dies is handed to `drop`."""
    taken: dict[str, list[SideTurn]] = {side: [] for side in running}
    for number in range(rounds):
        for side in list(taken) if number % 2 == 0 else list(taken)[::-1]:
            try:
                taken[side].append(running[side].turn(steps))
            except CannotRun as error:
                if drop is None:
                    raise
                del taken[side]
                drop(side, error)
    return taken


def ratios(field: str, first: Sequence[SideTurn], own: Sequence[SideTurn]) -> list[float]:
    """Returns round by round the first side's figure over that of a side."""
    return [getattr(one, field) / getattr(other, field) for one, other in zip(first, own, strict=True)]


def cells_of(first: Sequence[SideTurn], own: Sequence[SideTurn]) -> list[str]:
    """Returns the cells of a side under COLUMNS, but that of the loss."""
    from benchmarks.harness import quartiles

    cells = []
    for field in ("wall_s", "cpu_s"):
        cells.append(f"{1000 * statistics.median(getattr(turn, field) for turn in own):.0f}")
        cells.append("1" if first is own else quartiles(ratios(field, first, own)))
    return [*cells, f"{own[-1].memory_mib:.0f}"]


def reason_in(text: str) -> str:
    """Returns the sentence of a Python error in what a process has written: its last line that names one."""
    lines = [re.sub(r"^\[rank\d+\]:", "", line).strip() for line in text.splitlines() if line.strip()]  # torch's mark
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "ERROR", "Interrupt"))]
    errors = [line for line in errors if "Connection closed by peer" not in line] or errors  # which another one met
    return (errors or lines or ["it died without a word"])[-1][:200]


def launcher_environment(ranks: int = 1) -> dict[str, str]:
    """Returns the environment that `megalite train` sets for each of so many CPU ranks."""
    from launch.runtime.local_ranks import rank_settings
    from megalite.config import LaunchConfig

    return rank_settings(LaunchConfig(), ranks=ranks, on_gpu=False)[0]


class TurnAnswers:
    """A rank's lines of JSON: one when it is built and warm, and one after each number of steps on stdin."""

    def __init__(self) -> None:
        self._file, self._began = os.fdopen(os.dup(1), "w"), (0.0, 0.0)
        os.dup2(2, 1)  # what libraries print must not be taken for an answer

    def next_turn(self, steps: int, loss: float) -> int:
        """Tells of the steps since the turn began, and returns the number of the next. Ends with the comparison."""
        from benchmarks.data_costs import of_proc_self

        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        turn = {
            "wall_s": wall / steps,
            "cpu_s": cpu / steps,
            "memory_mib": of_proc_self("status", "VmHWM") / 1024,
            "loss": loss,
        }
        print(json.dumps(turn | {"loss": loss}), file=self._file, flush=True)
        if self._began == (0.0, 0.0):
            with suppress(OSError):  # where peaks cannot be forgotten, that of the start counts
                Path("/proc/self/clear_refs").write_text("5")
        if not (line := sys.stdin.readline()):
            os._exit(0)
        self._began = time.perf_counter(), time.process_time()
        return int(line)


def serve(file: str, function: str, *words: str) -> None:
    """One rank of a side: builds, warms up, and trains when told to."""
    answers = TurnAnswers()
    module = importlib.util.spec_from_file_location(f"benchmarks.{Path(file).stem}", ROOT / file)
    assert module is not None and module.loader is not None
    side = importlib.util.module_from_spec(module)
    sys.modules[module.name] = side  # dataclasses look there
    module.loader.exec_module(side)
    step: Callable[..., float] = getattr(side, function)(*words)
    imported = Path(sys.modules["megalite"].__path__[0]).parent
    assert imported == Path.cwd(), f"a rank runs the code of {imported}, not of {Path.cwd()}"
    if inspect.signature(step).parameters:
        step(answers)
    steps = WARM_UP_STEPS
    while True:
        for _ in range(steps):
            loss = step()
        steps = answers.next_turn(steps, loss)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    importlib.import_module("benchmarks")  # of this checkout, while all else is of the tree on PYTHONPATH
    del sys.path[0]
    serve(*sys.argv[1:])
