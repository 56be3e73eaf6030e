"""The training loop: batch -> step -> gate -> self-check -> save -> evaluate -> log; without an evaluation log -> save.

Observers add fields to a record and change nothing else; what decides about a step or a save is called by its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from megalite.config import Config
from megalite.engine.batch_transfer import MicroBatch
from megalite.engine.engine import Engine
from megalite.engine.step_result import StepResult
from megalite.monitor.memory import peak_memory_mib
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord
from megalite.monitor.source_losses import SourceLossMeans
from megalite.monitor.steps.recorder import StepRecorder
from megalite.resilience.guards import Action, Guard, Intervention
from megalite.resilience.replica_check import Disagreement, SelfCheck, explain
from megalite.resilience.stop_requests import Stop, StopRequests
from megalite.tracing.activity import Operation, Phase
from megalite.training.checkpoints import Checkpoints
from megalite.training.evaluation import EvaluationSet, evaluate
from megalite.training.learning_rate import rate_factors
from megalite.training.state import TrainingInterrupted, TrainingPreempted, TrainingStopped, TrainState

Batches = Iterator[Sequence[MicroBatch]]


@dataclass(frozen=True)
class TrainerContext:
    """The dependencies of the training loop."""

    batches: Callable[[TrainState], Batches]  # one item per step after a state; endless empty ones without need of data
    evaluation: Sequence[EvaluationSet]  # none: no evaluation
    lacks_evaluation: bool  # of the step that a resumed run begins from: it was ended in the middle of one
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
        return _TrainingRun(engine, config, state, context, recorder).train()


class _Due(NamedTuple):
    """The work that follows a step; where any of it is due, the step is read before the next one begins."""

    self_check: bool
    evaluation: bool
    save: bool


@dataclass(frozen=True)
class _PendingStep:
    """A step that the engine has begun, and whose result the host may have to wait for."""

    before: TrainState
    after: TrainState  # unless it turns out that it is not taken
    due: _Due
    micro_batches: Sequence[MicroBatch]
    learning_rate: float
    result: StepResult
    began: float  # time.perf_counter
    data_wait_s: float


class _TrainingRun:
    """One call of `train`.

    Where the device works behind the host, the result of a step is read when the next one has been begun, so that the
    device has something to do meanwhile. A step that was skipped has held back the one behind it, which is done again.
    """

    def __init__(
        self, engine: Engine, config: Config, state: TrainState, context: TrainerContext, recorder: StepRecorder
    ) -> None:
        self._engine, self._config, self._context, self._recorder = engine, config, context, recorder
        self._self_check, self._total_steps = SelfCheck(engine), config.total_steps
        self._resume_from(state)
        self._unread: _PendingStep | None = None
        self._last_read = 0.0  # time.perf_counter, when the last result was read
        self._step_time_s = 0.0  # of the last step that was read
        self._evaluation_loss: float | None = None  # of the last step that was read, or of the checkpoint gone back to
        self._saved_before_evaluation = False  # the state of the last step that was read

    def _resume_from(self, state: TrainState) -> None:
        self._state = state  # after the last step that was begun
        counted = self._config.counted_from(state.step, state.tokens_seen)
        self._shapes, self._rate_factor = counted.batches, rate_factors(counted, self._total_steps)
        self._source_losses = SourceLossMeans(self._config, state.source_losses)
        self._batches = self._context.batches(state)
        self._held_back: Sequence[MicroBatch] | None = None  # of the step that is done again
        self._is_save_asked = False  # after the coming step

    def train(self) -> TrainState:
        checkpoints = self._context.checkpoints
        checkpoints.saved_step = self._state.step
        if self._context.lacks_evaluation and self._is_evaluated(self._state.step):
            self._catch_up_evaluation(self._state.step)
        while self._state.step < self._total_steps:
            coming = self._state.step + 1
            read, is_save_due = self._advance(coming)
            stop = self._synchronize(coming, has_read=read is not None)
            if stop and self._unread is not None:
                read, self._unread = self._unread, None
                self._finish(read)
            if (is_save_due or stop) and not self._saved_before_evaluation:
                is_last = stop is not None or self._state.step >= self._total_steps
                checkpoints.save(self._saved_state(), self._evaluation_loss, is_last=is_last)
            # an evaluation has no loss where the request to stop has ended it
            is_cut_off = read is not None and read.due.evaluation and self._evaluation_loss is None
            if stop and (self._state.step < self._total_steps or is_cut_off):
                self._leave(stop)
        checkpoints.finish(self._saved_state())
        return self._state

    def _advance(self, coming: int) -> tuple[_PendingStep | None, bool]:
        """Begins the coming step and reads the one before; a step to be read at once begins when none is unread, in the
        next pass otherwise. Returns the step that was read, and whether the state must be saved."""
        due, unread, self._unread = self._due_after(coming), self._unread, None
        reads_now = self._reads_at_once(coming, due)
        begun = self._begin(coming, due) if unread is None or not reads_now else None
        if unread is None and reads_now:
            unread, begun = begun, None
        is_save_due = unread is not None and self._finish(unread, begun)
        if begun is not None and self._state.step == coming:  # else `_finish` has gone back, and holds its data
            self._unread = begun
            self._recorder.cut()
        return unread, is_save_due

    def _leave(self, stop: Stop) -> NoReturn:
        self._context.checkpoints.finish(self._saved_state())
        ending = TrainingInterrupted if stop.is_interrupt else TrainingPreempted
        raise ending(f"{stop.reason}: the state of step {self._state.step} is saved, start again to go on")

    def _due_after(self, step: int) -> _Due:
        every, checkpoint = self._config.training.self_check_every, self._config.checkpoint
        is_periodic = checkpoint.interval != "auto" and _is_multiple(step, checkpoint.interval)
        save = self._is_save_asked or is_periodic or (checkpoint.save_last and step == self._total_steps)
        return _Due(every > 0 and (save or _is_multiple(step, every)), self._is_evaluated(step), save)

    def _reads_at_once(self, step: int, due: _Due) -> bool:
        """Returns whether a step is read before the next one begins."""
        if any(due) or step == self._total_steps or self._recorder.profiler.is_due(step):
            return True
        ends_stage = self._shapes.shape_after(step) != self._shapes.shape_after(step - 1)
        return ends_stage or not (self._engine.runs_ahead and self._engine.decision.is_late(self._context.guard))

    def _begin(self, step: int, due: _Due) -> _PendingStep:
        """Begins one optimizer step, about which the guard may decide."""
        config, before, self._is_save_asked = self._config, self._state, False
        if due.self_check:
            self._self_check.watch()
        self._recorder.profiler.begin(step)
        self._context.requests.begin_step(step, lambda: self._context.checkpoints.saved_step)
        self._engine.activity.begin_phase(Phase.DATA, step)
        began = time.perf_counter()
        micro_batches = next(self._batches) if self._held_back is None else self._held_back
        self._held_back = None
        waited_s = time.perf_counter() - began
        learning_rate = config.optimizer.learning_rate * self._rate_factor(before.step)
        self._engine.use_shape(self._shapes.shape_after(before.step))
        result = self._engine.train_step(micro_batches, learning_rate, self._context.guard)
        self._state = after = self._after(before, skipped=False)
        return _PendingStep(before, after, due, micro_batches, learning_rate, result, began, waited_s)

    def _finish(self, pending: _PendingStep, behind: _PendingStep | None = None) -> bool:
        """Reads the result of a step, evaluates, logs, and does what the guard asks for.

        `behind` is the step that was begun meanwhile. Returns whether the state must be saved: a checkpoint is due, or
        one was loaded, to which a crash would go back again and again otherwise.
        """
        record, state = self._read(pending)
        # never None for a step that was not taken, whose state is not the one that `_begin` has assumed
        intervention = self._context.guard.after(state.step, pending.result, pending.micro_batches)
        differing: list[Disagreement] = []
        if pending.due.self_check:
            differing, seconds = self._self_check.run()
            record = record | {"self_check_s": seconds}
        self._saved_before_evaluation = False
        if pending.due.evaluation and not differing:
            record = record | self._evaluate(record, saves_first=pending.due.save and intervention is None)
        self._log(record, pending.result)
        if differing:
            raise TrainingStopped(explain(state.step, differing))
        self._evaluation_loss = record.get("evaluation_loss")
        if intervention is None:
            return pending.due.save
        self._state = state
        self._held_back = None if behind is None else behind.micro_batches
        if (returned := _intervene(self._context, intervention, state)) is None:
            return pending.due.save
        state, self._evaluation_loss = returned
        self._resume_from(state)
        return True

    def _read(self, pending: _PendingStep) -> tuple[StepRecord, TrainState]:
        """Reads a step's numbers; returns its record and the state after it."""
        numbers, shape = pending.result.readback.numbers, self._shapes.shape_after(pending.before.step)
        now = time.perf_counter()
        self._step_time_s, self._last_read = now - max(pending.began, self._last_read), now
        state = pending.after if pending.result.taken else self._after(pending.before, skipped=True)
        record: StepRecord = {
            "step": state.step,
            "time": time.time(),
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "learning_rate": pending.learning_rate,
            "tokens_seen": state.tokens_seen,
            "samples": [pending.before.consumed_samples, state.consumed_samples],
            "tokens_per_second": shape.tokens / self._step_time_s,
            "samples_per_second": shape.samples / self._step_time_s,
            "step_time_s": self._step_time_s,
            "data_wait_s": pending.data_wait_s,
            "memory_peak_mib": peak_memory_mib(),
            "skipped": not pending.result.taken,
            "skipped_steps": state.skipped_steps,
        }
        if numbers.loss_scale is not None:
            record["loss_scale"] = numbers.loss_scale
        if self._config.training.stages:
            record = record | {"global_batch_size": shape.global_batch_size, "sequence_length": shape.sequence_length}
        self._source_losses.add(pending.result)
        return record | self._source_losses.record(state.step), state

    def _evaluate(self, record: StepRecord, *, saves_first: bool) -> StepRecord:
        """Returns what an evaluation adds to the record of its step. A checkpoint that is due then is there before it:
        an evaluation may take long, and may fail."""
        context, found = self._context, StepRecord()
        if saves_first:
            context.observer.before_evaluation(record)
            context.checkpoints.save_before_evaluation(self._saved_state(), record["step"] >= self._total_steps)
            self._saved_before_evaluation = True
        try:
            found = evaluate(self._engine, context.evaluation, context.requests, record["step"])
        finally:
            if saves_first:
                context.checkpoints.end_evaluation(found.get("evaluation_loss"))
        return found

    def _catch_up_evaluation(self, step: int) -> None:
        self._context.requests.begin_step(step, lambda: step)
        found = evaluate(self._engine, self._context.evaluation, self._context.requests, step)
        if found:
            self._context.observer.on_late_evaluation({"step": step} | found)
            self._context.checkpoints.add_evaluation(step, found["evaluation_loss"])
        elif stop := self._context.requests.agree(save_next=False).stop:
            self._leave(stop)

    def _after(self, before: TrainState, *, skipped: bool) -> TrainState:
        shape = self._shapes.shape_after(before.step)
        return before.after(samples=shape.samples, tokens=shape.tokens, skipped=skipped)

    def _saved_state(self) -> TrainState:
        """Returns the state for a checkpoint, with what the guard and the log remember now."""
        remembered = {"guard": self._context.guard.state(), "source_losses": self._source_losses.state()}
        return self._state.model_copy(update=remembered)

    def _log(self, record: StepRecord, result: StepResult) -> None:
        observer, step = self._context.observer, record["step"]
        self._engine.activity.begin_phase(Phase.LOGGING)
        record = record | StepRecord(save_blocked_s=self._context.checkpoints.take_blocked_s())
        if (gathered := self._recorder.end_step(step, result, is_last=step == self._total_steps)) is not None:
            record = record | gathered.record()
            observer.on_breakdown(gathered.breakdown)
            for change in gathered.changes:
                observer.on_slow_rank(change)
        observer.on_step(record)
        self._context.checkpoints.report()

    def _synchronize(self, step: int, *, has_read: bool) -> Stop | None:
        """Agrees with all ranks on what comes next, also a save that rank 0 asks for; returns why to stop."""
        self._engine.activity.record_op(Operation.MEET, peers=self._engine.activity.peers.everyone)
        agreed = self._context.requests.agree(
            save_next=has_read and self._context.checkpoints.step_ended(self._step_time_s),
            **self._recorder.wishes(step, self._step_time_s),
        )
        self._recorder.after_barrier(step, profile_next=agreed.profile_next, gather_next=agreed.gather_next)
        self._is_save_asked |= agreed.save_next
        return agreed.stop

    def _is_evaluated(self, step: int) -> bool:
        is_due = step == self._total_steps or _is_multiple(step, self._config.training.evaluation.interval)
        return bool(self._context.evaluation) and is_due


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


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
