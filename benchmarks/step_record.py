"""Cost of the record that every rank keeps of its steps (megalite/monitor/steps), in processor time.

    python -m benchmarks.step_record             # writes benchmarks/results/step_record.md
    python -m benchmarks.step_record --turns 4   # a look, printed only

Shape: Llama, hidden 256, 4 layers, 4 heads, ffn 704, vocab 2048, 8 sequences of 128 tokens a step, fp32; two ranks of
one thread each, once as tp=2, which has the most collectives, and once as pp=2 with 8 micro-batches, which has the most
records. One pair of processes takes both kinds of steps in turns, the one or the other first by turns: with the
record means a tape, metered collectives, and at the end of every step what `monitor.log_interval: 1` does, the least
favourable choice. Processor time is that of all threads of a rank. A pair's ratio is that of both ranks together; the
table has the median over the pairs and, as what this machine can tell apart, the quartiles. The counted share is that
of the single costs, the least of 15 loops on rank 0, and of the median end of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import harness
from launch.parity.forked_ranks import run_ranks, warm_up

RESULTS = harness.RESULTS / "step_record.md"
MODEL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
BATCH, SEQUENCE = 8, 128
STEPS = 1  # of a turn
CALLS = 10_000  # of a loop, less than a tape holds
LAYOUTS = {
    "tp=2": ({"tensor_parallel_size": 2}, 8),
    "pp=2": ({"pipeline_parallel_size": 2}, 1),
}  # with micro-batch size


class TimedTurn(NamedTuple):
    """Seconds per step of one rank."""

    cpu_s: float
    wall_s: float


class RecordCosts(NamedTuple):
    """Measurements of one rank of a layout."""

    bare: list[TimedTurn]
    recorded: list[TimedTurn]
    records: int  # of a step
    collectives: int
    end_s: float  # of a step: sums, and what ranks tell each other
    note_s: float  # without a tape
    taped_note_s: float
    metered_s: float  # what the meter adds to a collective


def measure(rank: int, parallel: dict[str, int], micro_batch: int, turns: int) -> RecordCosts:
    """One rank: turns of steps with and without the record, in pairs, then single costs."""
    import numpy as np

    from megalite.config import resolve_layout
    from megalite.engine.build import build_engine
    from megalite.monitor.steps.recorder import StepRecorder
    from megalite.resilience.stop_requests import StopRequests
    from megalite.tracing.activity import Operation, Phase
    from models.decoder import decoder_layers

    options = {"parallel": parallel, "monitor": {"timeline": {"ranks": []}}}
    config = harness.config_of(MODEL, BATCH, SEQUENCE, micro_batch=micro_batch, steps=1_000_000, **options)
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, 2, "cpu"))
    requests, activity = StopRequests(None, 0.0), engine.activity
    shape = BATCH // micro_batch, micro_batch, SEQUENCE
    batches = harness.random_batches(np.random.default_rng(1), MODEL["vocab_size"], shape)
    number, sizes, ends = 1_000_000, [], []  # no power of ten, whose timeline would be kept

    def steps(recorder: StepRecorder | None) -> TimedTurn:
        nonlocal number
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            number += 1
            activity.begin_phase(Phase.DATA, number)
            result = engine.train_step(batches if engine.needs_data else [], 1e-4)
            float(result.loss)
            activity.begin_phase(Phase.LOGGING)
            if recorder is not None:
                sizes.append((len(recorder._tape._entries), len(recorder._tape._collectives)))
                ending = time.thread_time()
                recorder.end_step(number, result, is_last=False)
                ends.append(time.thread_time() - ending)
            activity.record_op(Operation.MEET, peers=activity.peers.everyone)
            requests.agree(save_next=False)
            if recorder is not None:
                recorder.after_barrier(number, profile_next=False, gather_next=True)
        return TimedTurn((time.process_time() - began_cpu) / STEPS, (time.perf_counter() - began) / STEPS)

    recorder = StepRecorder(engine, config, number, requests.group)
    taken: tuple[list[TimedTurn], list[TimedTurn]] = ([], [])

    def with_record() -> None:
        with recorder:
            activity.begin_phase(Phase.LOGGING)  # a tape that was away has a begin again
            recorder._tape.take()
            taken[1].append(steps(recorder))

    kinds: list[Callable[[], None]] = [lambda: taken[0].append(steps(None)), with_record]
    for turn in range(turns + 1):
        for kind in kinds if turn % 2 else reversed(kinds):
            kind()
    with recorder:
        taped = _least(lambda: activity.record_op(Operation.FORWARD, 1), recorder._tape.take)
        metered = recorder._meter._metered(lambda tensor, group: None, "all_reduce")
        group, tensor = engine.tensor_parallel_group(), next(engine.deepspeed.module.parameters())
        in_group = group if parallel.get("tensor_parallel_size") else engine.pipeline_groups()[0]
        meter = _least(lambda: metered(tensor, group=in_group), recorder._tape.take)
    plain = _least(lambda: activity.record_op(Operation.FORWARD, 1), lambda: None)
    return RecordCosts(taken[0][1:], taken[1][1:], *sizes[-1], statistics.median(ends), plain, taped, meter)


def _least(call: Callable[[], Any], between: Callable[[], Any]) -> float:
    """Seconds of one call, of the fastest of 15 loops."""
    seconds = []
    for _ in range(15):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        seconds.append((time.process_time() - began) / CALLS)
        between()
    return min(seconds)


def row(layout: str, ranks: list[RecordCosts]) -> str:
    """The table's row of a layout."""
    first = ranks[0]
    bare = [sum(turn.cpu_s for turn in pair) for pair in zip(*(costs.bare for costs in ranks), strict=True)]
    recorded = [sum(turn.cpu_s for turn in pair) for pair in zip(*(costs.recorded for costs in ranks), strict=True)]
    ratios = [with_record / without - 1 for with_record, without in zip(recorded, bare, strict=True)]
    counted = first.records * (first.taped_note_s - first.note_s) + first.collectives * first.metered_s + first.end_s
    cells = [
        layout,
        f"{1000 * statistics.median(turn.wall_s for turn in first.bare):.0f}",
        f"{1000 * statistics.median(bare) / len(ranks):.0f}",
        f"{first.records} + {first.collectives}",
        f"{1000 * first.end_s:.2f}",
        f"{100 * counted / (statistics.median(bare) / len(ranks)):.2f} %",
        f"{harness.quartiles([100 * ratio for ratio in ratios])} %",
    ]
    return harness.row(cells)


def report(measured: dict[str, list[RecordCosts]], turns: int, load: harness.Load) -> str:
    """The results file, up to what is written by hand below it."""
    least = [min(values) for values in zip(*(ranks[0][-3:] for ranks in measured.values()), strict=True)]
    columns = ("ms a step", "ms of processor a rank", "records + collectives a step", "ms for a step's end")
    return harness.page(
        "What the record of steps costs",
        "benchmarks.step_record",
        f"{harness.machine('torch', 'deepspeed')}. {load} The 2 ranks make 2 of it. {turns} pairs of turns.",
        *harness.header("layout", *columns, "counted share", "processor time more with the record: median (quartiles)"),
        *(row(layout, ranks) for layout, ranks in measured.items()),
        "",
        f"A record takes {1e6 * least[0]:.2f} us, on a tape {1e6 * least[1]:.2f} us; the meter adds "
        f"{1e6 * least[2]:.2f} us to a collective.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, help="pairs of turns; the results file stays")
    options = parser.parse_args()
    load, turns = harness.Load(), options.turns or 40
    warm_up({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    measured = {
        layout: run_ranks(measure, 2, parallel, size, turns, timeout_s=3600)
        for layout, (parallel, size) in LAYOUTS.items()
    }
    harness.show(report(measured, turns, load), RESULTS, renews=options.turns is None)


if __name__ == "__main__":
    main()
