"""Idle time of every pipeline schedule: measured on real ranks beside what the planner's table allows.

    python -m benchmarks.pipeline_bubble                       # two minutes; writes the results
    python -m benchmarks.pipeline_bubble --schedule zb-v       # a look, printed only

Four pipeline stages, eight micro-batches. The engine trains a decoder of no size over gloo, and every pass begins with
a sleep: a micro-batch's forward, input gradient and weight gradient take 0.24 s each on a stage, half of it on each of
two chunks. So ranks that share two cores are timed as if each had a device of its own, and what is added to the table's
time is what the engine does between passes. A step is measured from the first pass of any rank until the last one has
done its passes and its messages have been taken; the update of the weights is not in it. The shortest of some steps
counts, because other processes on the machine only ever lengthen one. The idle share is that of the stages' time.

Two more columns, by rank: how many micro-batches have the graph of their forward alive at most (those of a chunk count
as one), and how many lack their weight gradients at most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from launch.parity.forked_ranks import run_ranks, warm_up
from megalite.config import resolve_layout
from megalite.config.rules.pipeline import FEWEST_CHUNKS, SPLITS_BACKWARD
from megalite.parallel.mesh import Mesh
from megalite.schedules.passes import PassKind
from megalite.schedules.program import Program
from megalite.schedules.simulation import PipelineTimes, Timeline, simulate_schedule
from megalite.schedules.tables import Schedule
from megalite.tracing.activity import Activity, Operation

RESULTS = harness.RESULTS / "pipeline_bubble.md"
STAGES, MICRO_BATCHES = 4, 8
PART_S = 0.24  # of a micro-batch's forward, its input gradient and its weight gradient, on one stage
MOST_POINTS = 4.0  # between the measured and the simulated idle share
SEQUENCE = 8
MODEL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2 * STAGES,
    "num_attention_heads": 2,
    "max_position_embeddings": SEQUENCE,
}


@dataclass(frozen=True)
class RankStep:
    """One step as a rank saw it; times of time.monotonic, which all processes of a machine share."""

    began: float
    ended: float
    peak_alive: int  # micro-batches of a chunk between forward and the gradient of their input
    peak_without_weight_gradient: int  # between forward and the gradient of their weights


class SleepingActivity(Activity):
    """Records of a rank whose every pass begins with a sleep."""

    def __init__(self, mesh: Mesh, rank: int, schedule: Schedule) -> None:
        chunk_s = PART_S / FEWEST_CHUNKS[schedule.value]
        backward_s = chunk_s if schedule in SPLITS_BACKWARD else 2 * chunk_s
        self._sleeps = {Operation.FORWARD: chunk_s, Operation.BACKWARD: backward_s, Operation.WEIGHT_GRADIENT: chunk_s}
        self.times: list[tuple[Operation, float]] = []
        super().__init__(mesh, rank)

    def record_op(
        self,
        operation: Operation,
        micro_batch: int | None = None,
        peers: tuple[int, ...] = (),
        chunk: int | None = None,
    ) -> None:
        """See `Activity`."""
        super().record_op(operation, micro_batch, peers, chunk)
        if operation in self._sleeps or operation is Operation.OPTIMIZER:
            self.times.append((operation, time.monotonic()))
        if operation in self._sleeps:
            time.sleep(self._sleeps[operation])


def measure(rank: int, schedules: list[Schedule], steps: int) -> dict[Schedule, list[RankStep]]:
    """Runs the steps of every schedule on one rank."""
    from megalite.engine.pipeline import pipelined
    from megalite.engine.pipeline.pipeline_runtime import ProgramRun

    peaks: list[int] = []

    class CountedRun(ProgramRun):
        """Keeps each run's peak."""

        def run(self, program: Program) -> list[Any]:
            losses = super().run(program)
            peaks.append(self.peak_alive)
            return losses

    pipelined.ProgramRun = CountedRun  # type: ignore[attr-defined]  # this process runs nothing else
    return {schedule: _steps(rank, schedule, steps, peaks) for schedule in schedules}


def _steps(rank: int, schedule: Schedule, count: int, peaks: list[int]) -> list[RankStep]:
    import numpy as np
    import torch.distributed as dist

    from megalite.engine.build import build_engine
    from models.decoder import decoder_layers

    parallel = {"pipeline_parallel_size": STAGES, "pipeline_schedule": schedule.value}
    config = harness.config_of(MODEL, MICRO_BATCHES, SEQUENCE, parallel=parallel)
    layout = resolve_layout(config, STAGES, "cpu")
    activity = SleepingActivity(Mesh.of(layout), rank, schedule)
    engine = build_engine(decoder_layers(config.model), config, layout, activity)
    draw = np.random.default_rng(0)
    last = Operation.WEIGHT_GRADIENT if schedule in SPLITS_BACKWARD else Operation.BACKWARD
    steps = []
    for _ in range(count):
        batches = harness.random_batches(draw, config.model.vocab_size, (MICRO_BATCHES, 1, SEQUENCE))
        activity.times.clear()
        dist.barrier()
        engine.train_step(batches if engine.needs_data else [], 1e-3)
        unfinished = peak((done is Operation.FORWARD, done is last) for done, _ in activity.times)
        steps.append(RankStep(activity.times[0][1], activity.times[-1][1], peaks[-1], unfinished))
    return steps


def peak(events: Iterable[tuple[bool, bool]]) -> int:
    """Returns how many there are at most, of what begins and ends in each event."""
    now = most = 0
    for begins, ends in events:
        now += begins - ends
        most = max(most, now)
    return most


def simulated(schedule: Schedule) -> Timeline:
    """Returns the table's step, with free messages."""
    times = PipelineTimes([PART_S] * STAGES, [2 * PART_S] * STAGES)
    return simulate_schedule(schedule, times, MICRO_BATCHES, FEWEST_CHUNKS[schedule.value])


def peak_alive(timeline: Timeline) -> list[int]:
    """Returns the table's peak of each stage until the gradient of the input; `peak_in_flight` is until the last."""
    kept_on = (PassKind.FORWARD, PassKind.WEIGHT_GRADIENT)
    return [
        peak((each.kind is PassKind.FORWARD, each.kind not in kept_on) for each in timeline.work if each.stage == stage)
        for stage in range(STAGES)
    ]


def row(schedule: Schedule, ranks: list[list[RankStep]]) -> str:
    """Returns the table's row of a schedule. Fails where ranks held other micro-batches than the planner says."""
    timeline = simulated(schedule)
    took = [max(step.ended for step in steps) - min(step.began for step in steps) for steps in zip(*ranks, strict=True)]
    ideal_s, best_s, table_s = 3 * PART_S * MICRO_BATCHES, min(took), timeline.makespan_s
    alive = [max(step.peak_alive for step in steps) for steps in ranks]
    unfinished = [max(step.peak_without_weight_gradient for step in steps) for steps in ranks]
    assert alive == peak_alive(timeline), f"{schedule}: {alive} alive, {peak_alive(timeline)} in the table"
    assert unfinished == list(timeline.peak_in_flight), f"{schedule}: {unfinished}, {timeline.peak_in_flight}"
    points = 100 * (ideal_s / table_s - ideal_s / best_s)
    chunks = timeline.chunks
    cells = [
        schedule.value + (f", {chunks} chunks" if chunks > 1 else ""),
        f"{table_s:.2f}",
        f"{best_s:.2f}",
        " ".join(f"{each:.2f}" for each in took),
        f"{1 - ideal_s / table_s:.1%}",
        f"{1 - ideal_s / best_s:.1%}",
        f"{points:+.1f}" + ("" if points <= MOST_POINTS else " (too many)"),
        " ".join(map(str, alive)),
        " ".join(map(str, unfinished)),
    ]
    return harness.row(cells)


def report(table: list[str], steps: int, load: harness.Load) -> str:
    """Returns the results file, up to what is written by hand below it."""
    times = ("table, s", "measured, s", "all steps", "idle, table", "idle, measured", "points more")
    return harness.page(
        "Idle time of pipeline schedules",
        "benchmarks.pipeline_bubble",
        f"{harness.machine('torch', 'deepspeed')}; the {STAGES} ranks mostly sleep. {load} Best of {steps} steps.",
        *harness.header("schedule", *times, "alive at most, by rank", "without weight gradient"),
        *table,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedule", choices=[each.value for each in Schedule], help="one only; the results file stays"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of each schedule, of which the shortest counts")
    options = parser.parse_args()
    schedules = [Schedule(options.schedule)] if options.schedule else list(Schedule)
    warm_up({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    load = harness.Load()
    ranks = run_ranks(measure, STAGES, schedules, options.steps, timeout_s=120 + 20 * options.steps * len(schedules))
    table = [row(schedule, [rank[schedule] for rank in ranks]) for schedule in schedules]
    harness.show(report(table, options.steps, load), RESULTS, renews=not options.schedule)


if __name__ == "__main__":
    main()
