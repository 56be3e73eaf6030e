"""A step that sums gradients over replicas while backward goes on, beside one that does so after it, on a slow link.

    sudo python -m benchmarks.throttled_link                  # twelve minutes; writes the results
    sudo python -m benchmarks.throttled_link --only ZeRO-1    # the cases that begin so, printed only

The hosts are Linux namespaces. The ranks of a case first train on the bare link; then `tc` limits what each host sends,
so that its gradients take as long as the last backward pass did. From then on the two sides of the case take their
steps in turn, in the same processes:

- ZeRO-1: first everything is reduced after backward, by keeping the reducer back; then as it is.
- ZeRO-2 and 3: first without `overlap_comm` of DeepSpeed, and then with it; and, to compare with, one setting twice.

Llama, 4 layers, hidden 512, vocab 1024, fp32, micro-batches of 256 to 1,024 tokens; the model and gloo share the two
cores of the machine. Where backward "sleeps", hidden is 128, a micro-batch has 128 tokens, and a backward pass sleeps a
second in all, a part of it at each matrix's gradient, as if the rank computed on a device of its own.

What can be hidden is told from the steps that reduce after backward alone: from when each bucket had its last gradient,
and from how long the reduction of all of them took. A bucket begins when it is complete and the one before it has
ended, and takes its share of that time; what lies after the end of backward is exposed, and the rest can be hidden.
Times are rank 0's; a step lasts from a barrier until the loss is known. What is saved is the median over the pairs of
steps, with quartiles behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.throttled_link.cases import CASES, LinkCase, LinkStep
from tests.helpers.cluster_machine import why_no_hosts
from tests.helpers.hosts import Cluster, HostCommand

RESULTS = harness.RESULTS / "throttled_link.md"
OF_NUMBER = 4  # bytes on the wire


class LinkedRanks:
    """The ranks of a case, on two hosts."""

    def __init__(self, cluster: Cluster, case: LinkCase) -> None:
        self._cluster, self.case = cluster, case
        shared = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(case.ranks)}
        shared |= {"MASTER_ADDR": cluster.hosts["node1"].ip, "MASTER_PORT": "29500"}
        self._ranks: list[HostCommand] = []
        for rank in range(case.ranks):
            replica, stage = rank % 2, rank // 2
            self._ranks.append(
                cluster.hosts[cluster.names[replica]].popen(
                    [sys.executable, "-m", "benchmarks.throttled_link.rank", case.name],
                    cwd=harness.ROOT,
                    env=shared | {"RANK": str(rank), "LOCAL_RANK": str(stage)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        self._numbers = sum(self._answer(rank) for rank in self._ranks) // 2  # of one host's gradients

    def throttle(self, seconds: float) -> float:
        """Makes the link so slow that the gradients of all ranks take so long; returns its bytes/s in one direction."""
        # of two replicas each sends all of its gradients: gloo sums by all-reduce
        rate = OF_NUMBER * self._numbers / seconds
        for name in self._cluster.names:
            self._cluster.throttle(name, rate)
        return rate

    def step(self, side: int) -> LinkStep:
        """Trains a step of a side; returns rank 0's account of it."""
        is_kept_back = self.case.zero < 3 and side == 0
        for rank in self._ranks:
            assert rank.stdin is not None
            print(json.dumps([side if self.case.zero == 3 else 0, is_kept_back]), file=rank.stdin, flush=True)
        first, *_ = [self._answer(rank) for rank in self._ranks]
        return LinkStep(**first)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def _answer(self, rank: HostCommand) -> Any:
        assert rank.stdout is not None
        if not (line := rank.stdout.readline()):
            raise SystemExit("a rank of the benchmark died; its message is above")
        return json.loads(line)


def measure(case: LinkCase, pairs: int) -> tuple[float, list[list[LinkStep]]]:
    """Returns the bytes/s of the link in one direction, and the steps of both sides."""
    with Cluster(2) as cluster:
        ranks = LinkedRanks(cluster, case)
        try:
            rate = ranks.throttle(statistics.median(ranks.step(side=1).backward_s for _ in range(3)))
            taken: list[list[LinkStep]] = [[], []]
            for side in (0, 1):
                ranks.step(side)  # the first on the slow link
            for number in range(pairs):
                for side in (0, 1) if number % 2 else (1, 0):
                    taken[side].append(ranks.step(side))
            return rate, taken
        finally:
            ranks.close()


def row(case: LinkCase, rate: float, first: list[LinkStep], second: list[LinkStep]) -> str:
    """Returns the table's row of a case."""

    def median(steps: list[LinkStep], value: Callable[[LinkStep], float]) -> float:
        return statistics.median(value(step) for step in steps)

    saved = [one.step_s - other.step_s for one, other in zip(first, second, strict=True)]
    times = [median(steps, lambda step: step.step_s) for steps in (first, second)]
    megabytes = [f"{median(steps, lambda step: step.sent_bytes) / 1e6:.1f}" for steps in (first, second)]
    cells = [
        case.name,
        f"{8 * rate / 1e6:.0f}",
        ", ".join(dict.fromkeys(megabytes)),
        f"{median(first, lambda step: step.backward_s):.2f}",
    ]
    reduced, by_end = ["", "", ""], ["", ""]
    if case.zero == 1:
        hideable = median(first, lambda step: step.hideable_s)
        reduction, exposed = (median(steps, lambda step: step.exposed_s) for steps in (first, second))
        reduced = [f"{reduction:.2f}", f"{exposed:.2f}", f"{hideable:.2f} ({hideable / reduction:.0%})"]
        sent = [f"{median(steps, lambda step: step.sent):.0%}" for steps in (first, second)]
        by_end = [f"{statistics.median(saved) / hideable:.2f}", " and ".join(sent)]
    ratio = statistics.median(b.step_s / a.step_s for a, b in zip(first, second, strict=True))
    cells += [*reduced, f"{times[0]:.2f}", f"{times[1]:.2f}", harness.quartiles(saved), f"{ratio:.2f}", *by_end]
    return harness.row(cells)


def report(table: list[str], pairs: int, load: harness.Load) -> str:
    """Returns the results file, up to what is written by hand below it."""
    reduction = ("last backward", "reduced after it", "exposed beside it", "can be hidden")
    saved = ("saved (quartiles)", "ratio", "saved / can be hidden", "sent when backward ended")
    return harness.page(
        "Gradients of replicas over a slow link",
        "benchmarks.throttled_link",
        f"{harness.machine('torch', 'deepspeed')}. {load} Median of {pairs} pairs of steps. Times are seconds.",
        *harness.header("case", "Mbit/s", "MB sent", *reduction, "step, first", "step, second", *saved),
        *table,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases whose names begin so; the results file stays")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of steps")
    options = parser.parse_args()
    if reason := why_no_hosts():
        raise SystemExit(reason)
    load, table = harness.Load(), []
    for case in CASES:
        if case.name.startswith(options.only):
            rate, (first, second) = measure(case, options.pairs)
            table.append(row(case, rate, first, second))
            print(table[-1], flush=True)
    harness.show(report(table, options.pairs, load), RESULTS, renews=not options.only)


if __name__ == "__main__":
    main()
