"""The training loop on one page: batch -> step -> gate -> evaluate -> log -> save.

Observers see each record and change nothing; what decides about a step or a save is called by its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.config import Config
from megalite.engine.activity import Operation, Phase
from megalite.engine.engine import Engine, MicroBatch
from megalite.monitor.memory import peak_memory_mib
from megalite.monitor.observer import Observer
from megalite.monitor.steps.recorder import StepRecorder
from megalite.resilience.guards import Action, Guard, Intervention
from megalite.resilience.replica_check import Disagreement, SelfCheck, explain
from megalite.resilience.stop_requests import StopRequests
from megalite.training.checkpoints import Checkpoints
from megalite.training.state import (
    TrainingInterrupted,
    TrainingPreempted,
    TrainingStopped,
    TrainState,
    learning_rate_factor,
)

Batches = Iterator[Sequence[MicroBatch]]


@dataclass(frozen=True)
class TrainerContext:
    """The dependencies of the training loop."""

    batches: Callable[[TrainState], Batches]  # one item per step after a state; endless empty ones without need of data
    evaluation: Sequence[MicroBatch]  # this replica's held-out micro-batches; empty where a rank needs no data
    evaluation_count: int  # held-out micro-batches per replica; 0: no evaluation
    guard: Guard
    checkpoints: Checkpoints
    requests: StopRequests
    observer: Observer  # sees every record, and hands it on to all others


def train(engine: Engine, config: Config, state: TrainState, context: TrainerContext) -> TrainState:
    """Trains from `state` to the run's last step; returns the state at the end.

    Raises TrainingStopped if a guard or a self-check ends the run, TrainingPreempted (after Ctrl-C TrainingInterrupted)
    if it was asked to end and its state is saved, SaveFailed if it ends and its state cannot be saved.
    """
    with StepRecorder(engine, config, state.step, context.requests.group) as recorder:
        return _train(engine, config, state, context, recorder)


def _train(
    engine: Engine, config: Config, state: TrainState, context: TrainerContext, recorder: StepRecorder
) -> TrainState:
    activity, guard, checkpoints = engine.activity, context.guard, context.checkpoints
    self_check, total_steps = SelfCheck(engine), config.total_steps
    batches, is_save_due = context.batches(state), False
    checkpoints.saved_step = state.step
    while state.step < total_steps:
        step = state.step + 1
        is_save_due |= _is_saved(config, step, total_steps)
        is_checked = config.training.self_check_every > 0 and (
            is_save_due or _is_multiple(step, config.training.self_check_every)
        )
        if is_checked:
            self_check.watch()

        recorder.begin_step(step)
        context.requests.begin_step(step, checkpoints.saved_step)
        record, state, intervention = _step(engine, config, state, batches, guard, total_steps)
        if context.evaluation_count and (
            step == total_steps or _is_multiple(step, config.training.evaluation.interval)
        ):
            record |= _evaluate(engine, context)
        differing: list[Disagreement] = []
        if is_checked:
            differing, record["self_check_s"] = self_check.run()

        activity.begin_phase(Phase.LOGGING)
        record["save_blocked_s"] = checkpoints.collect()
        if (gathered := recorder.end_step(step, is_last=step == total_steps)) is not None:
            record |= gathered.record()
            context.observer.on_breakdown(gathered.breakdown)
            for change in gathered.changes:
                context.observer.on_slow_rank(change)
        context.observer.on_step(record)
        if differing:
            raise TrainingStopped(explain(step, differing))
        evaluation_loss = record.get("evaluation_loss")
        if intervention is not None and (returned := _intervene(context, intervention, state)) is not None:
            state, evaluation_loss = returned
            batches, is_save_due = context.batches(state), True  # or a crash would go back here again and again

        activity.record_op(Operation.MEET, peers=activity.peers.everyone)
        stop, is_next_save_due, is_next_profiled = context.requests.agree(
            save_next=checkpoints.is_due(record["step_time_s"]), profile_next=recorder.profiler.is_asked()
        )
        recorder.left_meeting(step, profile_next=is_next_profiled)
        if is_save_due or stop:
            is_last = stop is not None or state.step >= total_steps
            checkpoints.save(_with_guard(state, guard), evaluation_loss, is_last=is_last)
        if stop and state.step < total_steps:
            checkpoints.finish(_with_guard(state, guard))
            ending = TrainingInterrupted if stop.is_interrupt else TrainingPreempted
            raise ending(f"{stop.reason}: the state of step {state.step} is saved, start again to go on")
        is_save_due = is_next_save_due
    checkpoints.finish(_with_guard(state, guard))
    return state


def _with_guard(state: TrainState, guard: Guard) -> TrainState:
    """Returns the state for a checkpoint, with what the guard remembers now."""
    return state.model_copy(update={"guard": guard.state()})


def _step(
    engine: Engine, config: Config, state: TrainState, batches: Batches, guard: Guard, total_steps: int
) -> tuple[dict[str, Any], TrainState, Intervention | None]:
    """Runs one optimizer step, which the guard's gate may refuse; returns its record, the state after it and, if it was
    not taken, what the guard asks for."""
    training = config.training
    engine.activity.begin_phase(Phase.DATA, state.step + 1)
    started = time.perf_counter()
    micro_batches = next(batches)
    waited_s = time.perf_counter() - started
    learning_rate = config.optimizer.learning_rate * learning_rate_factor(config.schedule, state.step, total_steps)
    result = engine.train_step(micro_batches, learning_rate, guard)
    loss, grad_norm = float(result.loss), float(result.grad_norm)
    step_time_s = time.perf_counter() - started
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
        "tokens_per_second": tokens / step_time_s,
        "samples_per_second": training.global_batch_size / step_time_s,
        "step_time_s": step_time_s,
        "data_wait_s": waited_s,
        "memory_peak_mib": peak_memory_mib(),
        "skipped": not result.taken,
        "skipped_steps": state.skipped_steps,
    }
    return record, state, guard.after(state.step, result, micro_batches)


def _evaluate(engine: Engine, context: TrainerContext) -> dict[str, float]:
    started = time.perf_counter()
    loss = float(engine.evaluate(context.evaluation, context.evaluation_count))
    return {"evaluation_loss": loss, "evaluation_s": time.perf_counter() - started}


def _intervene(
    context: TrainerContext, intervention: Intervention, state: TrainState
) -> tuple[TrainState, float | None] | None:
    """Logs an intervention, then stops or rolls back if it asks for that.

    Returns the state and evaluation loss of the checkpoint that is loaded, or None if training goes on from `state`.
    """
    context.observer.on_intervention(intervention.facts, intervention.sentence)
    if intervention.action is Action.STOP:
        raise TrainingStopped(intervention.sentence)
    if intervention.action is Action.SKIP:
        return None
    returned = context.checkpoints.roll_back(state)
    if returned is None:
        context.guard.could_not_roll_back()
    else:
        context.guard.rolled_back(returned[0].guard)
    return returned


def _is_saved(config: Config, step: int, total_steps: int) -> bool:
    """Returns whether the config alone asks for a checkpoint after `step`."""
    checkpoint = config.checkpoint
    periodic = checkpoint.interval != "auto" and _is_multiple(step, checkpoint.interval)
    return periodic or (checkpoint.save_last and step == total_steps)


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
