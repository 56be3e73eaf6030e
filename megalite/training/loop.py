"""The loop: batch -> step -> log -> evaluate -> save, visible on one page.

In: an engine, where the run stands, the batches of the coming steps, what to do with a record and a checkpoint.
Out: where the run stands at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.config import Config
from megalite.engine.engine import Engine, MicroBatch
from megalite.monitor.memory import peak_memory_mib
from megalite.resilience.replicas import Disagreement, SelfCheck, explain
from megalite.training.errors import TrainingStopped
from megalite.training.schedule import learning_rate_factor
from megalite.training.state import TrainState


@dataclass(frozen=True)
class Job:
    """What the loop is given from outside."""

    batches: Iterator[Sequence[MicroBatch]]  # one item per coming step; endless empty ones where a rank needs no data
    evaluation: Sequence[MicroBatch]  # this replica's held-out micro-batches; empty where a rank needs no data
    evaluation_count: int  # held-out micro-batches per replica; 0: no evaluation
    log: Callable[[dict[str, Any]], None]
    save: Callable[[TrainState], None]


def train(engine: Engine, config: Config, state: TrainState, job: Job) -> TrainState:
    """Trains from `state` to the run's last step.

    Raises TrainingStopped when too many steps in a row are skipped, or when copies of a weight are not equal any more.
    """
    total_steps, checkpoint, training = config.total_steps, config.checkpoint, config.training
    self_check = SelfCheck(engine)
    while state.step < total_steps:
        step = state.step + 1
        is_last = step == total_steps
        is_saved = (is_last and checkpoint.save_last) or _is_due(step, checkpoint.interval)
        is_checked = training.self_check_every > 0 and (is_saved or _is_due(step, training.self_check_every))
        if is_checked:
            self_check.watch()
        record, state = _step(engine, config, state, job.batches)
        if job.evaluation_count and (is_last or _is_due(step, training.evaluation.interval)):
            record["evaluation_loss"] = float(engine.evaluate(job.evaluation, job.evaluation_count))
        differing: list[Disagreement] = []
        if is_checked:
            differing, record["self_check_s"] = self_check.run()
        job.log(record)
        if differing:
            raise TrainingStopped(explain(step, differing))
        if state.consecutive_skipped_steps >= config.guards.max_interventions:
            raise TrainingStopped(
                f"{state.consecutive_skipped_steps} steps in a row had gradients that are not finite, the last is step "
                f"{step}: lower optimizer.learning_rate, or look at the data of samples {record['samples']}"
            )
        if is_saved:
            job.save(state)
    return state


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _step(
    engine: Engine, config: Config, state: TrainState, batches: Iterator[Sequence[MicroBatch]]
) -> tuple[dict[str, Any], TrainState]:
    """One optimizer step and its record in metrics.jsonl."""
    training = config.training
    learning_rate = config.optimizer.learning_rate * learning_rate_factor(
        config.schedule, state.step, config.total_steps
    )
    started = time.perf_counter()
    micro_batches = next(batches)
    waited = time.perf_counter() - started
    result = engine.train_step(micro_batches, learning_rate)
    loss, grad_norm = float(result.loss), float(result.grad_norm)
    elapsed = time.perf_counter() - started
    tokens = training.global_batch_size * training.sequence_length
    first_sample = state.consumed_samples
    state = state.after(samples=training.global_batch_size, tokens=tokens, skipped=result.skipped)
    record = {
        "step": state.step,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "tokens_seen": state.tokens_seen,
        "samples": [first_sample, state.consumed_samples],
        "tokens_per_second": tokens / elapsed,
        "step_time_s": elapsed,
        "data_wait_s": waited,
        "memory_peak_mib": peak_memory_mib(),
        "skipped": result.skipped,
        "skipped_steps": state.skipped_steps,
    }
    return record, state
