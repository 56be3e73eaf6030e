"""Timelines of real ranks: their trace is sound under every schedule, and a slow stage is told from the bubble."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launch.inspection.timelines import read_kept_step
from launch.inspection.trace import write_trace
from megalite.config import Config
from megalite.engine.engine import Engine
from megalite.monitor.steps.passes import passes_of
from megalite.monitor.steps.pipeline_parts import pipeline_parts
from megalite.monitor.steps.recorder import StepRecorder
from megalite.schedules.program import Send, training_programs
from megalite.schedules.tables import Schedule
from megalite.tracing.activity import Operation, Phase
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks
from tests.helpers.sound_trace import check_sound, read_trace

TIED = {"tie_word_embeddings": True}
FIRST = Case(pp=2, dp=2, zero=2, accumulation=4, steps=2, bucket=3000, model=TIED)
SCHEDULES = [
    FIRST,
    *(replace(FIRST, dp=1, zero=1, schedule=name) for name in ("interleaved", "zero-bubble", "zb-v", "dualpipev")),
]


def _config(case: Case, run_dir: Path) -> Config:
    values = case.config().model_dump(mode="json")
    return Config.model_validate(
        values | {"run_dir": str(run_dir), "monitor": {"timeline": {"steps": list(range(1, case.steps + 1))}}}
    )


def _train(engine: Engine, case: Case, run_dir: Path, *, is_evaluated: bool) -> None:
    """Steps in the order of the training loop, each followed by an evaluation that uses the same micro-batches."""
    with StepRecorder(engine, _config(case, run_dir), 0, dist.group.WORLD) as recorder:
        for step, batch in enumerate(global_batches(case), 1):
            engine.activity.begin_phase(Phase.DATA, step)
            micro_batches = micro_batches_of(engine, case, batch)
            result = engine.train_step(micro_batches, case.learning_rate)
            if is_evaluated:
                engine.evaluate(micro_batches, case.accumulation)
                engine.evaluate(micro_batches, case.accumulation)
            engine.activity.begin_phase(Phase.LOGGING)
            recorder.end_step(step, result, is_last=step == case.steps)
            dist.barrier()
            recorder.after_barrier(step, profile_next=False, gather_next=True)


def _recorded(rank: int, cases: list[Case], run_dir: Path) -> None:
    for case in cases:
        engine = engine_of(case)
        (run_dir / case.schedule).mkdir(exist_ok=True)
        _train(engine, case, run_dir / case.schedule, is_evaluated=True)
        engine.deepspeed.destroy()


def test_the_trace_of_every_schedule_is_sound(tmp_path: Path) -> None:
    """Micro-batches of evaluations have the numbers of the training step's, and a pass of ZeRO-2 has pieces."""
    run_ranks(_recorded, 4, SCHEDULES[:1], tmp_path)
    run_ranks(_recorded, 2, SCHEDULES[1:], tmp_path)
    for case in SCHEDULES:
        run_dir = tmp_path / case.schedule
        written = write_trace(run_dir, [1, 2], run_dir / "trace.json.gz")
        assert written.problems == () and written.ranks == case.world_size, case
        events = read_trace(written.path)
        arrows = check_sound(events)
        messages = passes = 0
        timelines = read_kept_step(run_dir, 2).aligned.timelines
        chunks = timelines[0].owner.chunks
        for program in training_programs(Schedule(case.schedule), case.pp, case.accumulation, chunks):
            messages += sum(isinstance(action, Send) for action in program)
            passes += sum(not isinstance(action, Send) and hasattr(action, "kind") for action in program)
        of_training = [e for e in events if e["ph"] == "s" and e["args"]["phase"] == "step"]
        assert len(of_training) == 2 * case.dp * messages, f"{case}: an arrow for each message of both steps"
        assert arrows == written.arrows and arrows > len(of_training), f"{case}: those of evaluations too"
        assert sum(len(passes_of(each)) for each in timelines.values()) == case.dp * passes, case
        found = pipeline_parts(timelines)
        assert found is not None and sum(found.parts_s.values()) == pytest.approx(found.span_s, abs=1e-9), case


PART_S = 0.08  # of a micro-batch's forward, and half of its backward
SLOW_STAGE, SLOWER = 2, 1.5
SLEEPING = Case(pp=4, accumulation=8, micro_batch=1, sequence=8, steps=3)


def _sleeping(rank: int, run_dir: Path) -> None:
    """Passes begin with a sleep: none in step 1, equal ones in step 2, and longer ones on one stage in step 3."""
    engine = engine_of(SLEEPING)
    record, sleeps = engine.activity.record_op, {Operation.FORWARD: PART_S, Operation.BACKWARD: 2 * PART_S}

    def record_and_sleep(operation: Operation, *args: Any, **kwargs: Any) -> None:
        record(operation, *args, **kwargs)
        now = engine.activity.now
        if operation in sleeps and now.step > 1:
            is_slow = now.step == 3 and engine.coordinate.pipeline_rank == SLOW_STAGE
            time.sleep(sleeps[operation] * (SLOWER if is_slow else 1.0))

    engine.activity.record_op = record_and_sleep  # type: ignore[method-assign]
    _train(engine, SLEEPING, run_dir, is_evaluated=False)


def test_the_bubble_of_sleeping_stages_is_the_tables_and_a_slow_stage_is_named(tmp_path: Path) -> None:
    """Stages that sleep need no core of their own, so a busy machine can show what four devices would.

    The idle share is compared: what the machine adds to each pass is in the bubble and in the work.
    """
    run_ranks(_sleeping, 4, tmp_path)
    even, uneven = (pipeline_parts(read_kept_step(tmp_path, step).aligned.timelines) for step in (2, 3))
    assert even is not None and uneven is not None
    stages, micro_batches = SLEEPING.pp, SLEEPING.accumulation
    table = (stages - 1) / (micro_batches + stages - 1)
    assert even.own_idle_of_span == pytest.approx(table, rel=0.05)
    assert even.idle_of_span >= even.own_idle_of_span - 0.01, "no real pipeline is better than its table"
    ideal_s = 3 * PART_S * (SLOWER - 1) * (1 - 1 / stages) * micro_batches
    assert uneven.slowest_stage.stage == SLOW_STAGE
    assert uneven.slowest_over_mean == pytest.approx(SLOWER / (1 + (SLOWER - 1) / stages), rel=0.1)
    assert uneven.imbalance_s > 0.5 * ideal_s > 2 * abs(even.imbalance_s), (even.parts_s, uneven.parts_s)
