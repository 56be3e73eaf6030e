"""The loop: batch -> step -> judge -> evaluate -> log -> save, visible on one page.

In: an engine, where the run stands, the batches of the coming steps, what to do with a record and a checkpoint.
Out: where the run stands at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.config import Config
from megalite.engine.activity import Operation, Phase
from megalite.engine.engine import Engine, MicroBatch
from megalite.monitor.memory import peak_memory_mib
from megalite.resilience.guards import Action, Guard, Intervention
from megalite.resilience.replicas import Disagreement, SelfCheck, explain
from megalite.resilience.requests import Requests
from megalite.training.checkpoints import Checkpoints
from megalite.training.errors import TrainingPreempted, TrainingStopped
from megalite.training.schedule import learning_rate_factor
from megalite.training.state import TrainState

Batches = Iterator[Sequence[MicroBatch]]


@dataclass(frozen=True)
class Job:
    """What the loop is given from outside."""

    batches: Callable[[TrainState], Batches]  # one item per step after a state; endless empty ones without need of data
    evaluation: Sequence[MicroBatch]  # this replica's held-out micro-batches; empty where a rank needs no data
    evaluation_count: int  # held-out micro-batches per replica; 0: no evaluation
    guard: Guard
    checkpoints: Checkpoints
    requests: Requests
    log: Callable[[dict[str, Any]], None]
    intervened: Callable[[Intervention], None]


def train(engine: Engine, config: Config, state: TrainState, job: Job) -> TrainState:
    """Trains from `state` to the run's last step.

    Raises TrainingStopped where a guard or a self-check ends the run, TrainingPreempted where it was asked to end and
    is saved, SaveFailed where it ends unsaved.
    """
    self_check, checkpoints = SelfCheck(engine), job.checkpoints
    batches, save_next = job.batches(state), False
    while state.step < config.total_steps:
        due = _due(config, state.step + 1, save_next)
        if due.check:
            self_check.watch()
        record, state, intervention = _step(engine, config, state, batches, job.guard)
        if due.evaluation and job.evaluation_count:
            record |= _evaluate(engine, job)
        differing: list[Disagreement] = []
        if due.check:
            engine.activity.begin(Phase.SELF_CHECK)
            differing, record["self_check_s"] = self_check.run()
        engine.activity.begin(Phase.LOGGING)
        record["save_blocked_s"] = checkpoints.collect()
        job.log(record)
        if differing:
            raise TrainingStopped(explain(state.step, differing))
        evaluation_loss = record.get("evaluation_loss")
        if intervention is not None:
            job.intervened(intervention)
            if intervention.action is Action.STOP:
                raise TrainingStopped(intervention.sentence)
            if intervention.action is Action.ROLLBACK:
                returned = checkpoints.roll_back(state)
                if returned is None:
                    job.guard.could_not_roll_back()
                else:
                    state, evaluation_loss = returned
                    job.guard.rolled_back(state.guard)
                    batches = job.batches(state)
                    due = replace(due, save=True)  # or a run that dies now would go back here again, and again
        engine.activity.note(Operation.MEET, peers=engine.activity.peers.everyone)
        agreed = job.requests.agree(checkpoints.is_due(record["step_time_s"]))
        save_next = agreed.save_next
        if due.save or agreed.stop:
            checkpoints.save(state.model_copy(update={"guard": job.guard.state()}), evaluation_loss)
        if agreed.stop and state.step < config.total_steps:
            checkpoints.finish(state)
            raise TrainingPreempted(f"{agreed.stop}: the state of step {state.step} is saved, start again to go on")
    checkpoints.finish(state)
    return state


@dataclass(frozen=True)
class _Due:
    """What a step ends with."""

    save: bool
    check: bool
    evaluation: bool


def _due(config: Config, step: int, save_asked: bool) -> _Due:
    is_last, checkpoint, training = step == config.total_steps, config.checkpoint, config.training
    periodic = checkpoint.interval != "auto" and _is_multiple(step, checkpoint.interval)
    save = periodic or save_asked or (is_last and checkpoint.save_last)
    every = training.self_check_every
    evaluation = training.evaluation.interval
    return _Due(
        save=save,
        check=every > 0 and (save or _is_multiple(step, every)),
        evaluation=evaluation > 0 and (is_last or _is_multiple(step, evaluation)),
    )


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _evaluate(engine: Engine, job: Job) -> dict[str, float]:
    engine.activity.begin(Phase.EVALUATION)
    started = time.perf_counter()
    loss = float(engine.evaluate(job.evaluation, job.evaluation_count))
    return {"evaluation_loss": loss, "evaluation_s": time.perf_counter() - started}


def _step(
    engine: Engine, config: Config, state: TrainState, batches: Batches, guard: Guard
) -> tuple[dict[str, Any], TrainState, Intervention | None]:
    """One optimizer step, its record in metrics.jsonl, and what a guard wants done about it."""
    training = config.training
    learning_rate = config.optimizer.learning_rate * learning_rate_factor(
        config.schedule, state.step, config.total_steps
    )
    engine.activity.begin(Phase.DATA, state.step + 1)
    started = time.perf_counter()
    micro_batches = next(batches)
    waited = time.perf_counter() - started
    engine.activity.begin(Phase.STEP)
    result = engine.train_step(micro_batches, learning_rate, guard.judge)
    loss, grad_norm = float(result.loss), float(result.grad_norm)
    elapsed = time.perf_counter() - started
    tokens = training.global_batch_size * training.sequence_length
    first_sample = state.consumed_samples
    state = state.after(samples=training.global_batch_size, tokens=tokens, skipped=not result.taken)
    record = {
        "step": state.step,
        "time": time.time(),
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "tokens_seen": state.tokens_seen,
        "samples": [first_sample, state.consumed_samples],
        "tokens_per_second": tokens / elapsed,
        "step_time_s": elapsed,
        "data_wait_s": waited,
        "memory_peak_mib": peak_memory_mib(),
        "skipped": not result.taken,
        "skipped_steps": state.skipped_steps,
    }
    return record, state, guard.after(state.step, result, micro_batches)
