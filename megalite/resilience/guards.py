"""Guards: a step whose loss or gradients are not what they should be changes no weight, and somebody is told why.

In: what the engine says about each step. Out: where it was not taken, an `Intervention` that tells the loop what to do.
NaN and Inf are found by DeepSpeed's own check of the gradients and cost nothing; a spike is a z-score over the losses
of the last steps, and costs waiting for the loss of each step. Every rank has a guard, fed with the same numbers, so
all decide alike. Its `state` belongs into the checkpoint: a resumed run judges as the uninterrupted one would have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from megalite.config.guards import GuardsConfig, Policy
from megalite.engine.engine import Engine, MicroBatch, StepResult
from megalite.engine.seams import loss_scale_can_fall, loss_scaler_state
from megalite.engine.verdict import Judge
from megalite.resilience import blame
from megalite.resilience.blame import Suspect, Testimony
from megalite.resilience.report import Cause, Report, Spike

ROUNDING = 1e-6  # of the mean: losses that lie closer together than this differ by rounding only
NAMED_GRADIENTS = 3  # in the report of a spike
REMEMBERED_WINDOWS, REMEMBERED_STEPS = 10, 1000  # the longer of them: how much progress makes a rollback forgotten

DocumentsOf = Callable[[int], Iterable[object]]
"""Sample number -> the documents that it is packed from, each as its text names it."""


class Action(StrEnum):
    """What the loop does after a step that changed nothing."""

    SKIP = "skip"  # go on with the next batch
    ROLLBACK = "rollback"  # go back to the last checkpoint, and on behind the data that led here
    STOP = "stop"


@dataclass(frozen=True)
class Intervention:
    """A step that changed nothing, and what follows."""

    action: Action
    report: Report
    summary: str = ""  # where it stops: why here, and what came before

    @property
    def sentence(self) -> str:
        """All of it for people."""
        return ": ".join(filter(None, (self.summary, str(self.report))))

    @property
    def facts(self) -> dict[str, Any]:
        """All of it for events.jsonl, as JSON holds it."""
        return self.report.facts | {"action": self.action.value, "sentence": self.sentence}


class Guard:
    """Decides which steps are taken (it is the engine's `Judge`) and what follows when one was not."""

    def __init__(self, engine: Engine, config: GuardsConfig, documents_of: DocumentsOf | None = None) -> None:
        self._engine, self._config, self._documents_of = engine, config, documents_of
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._skips_in_row = self._skips = self._rollbacks = 0
        self._rolled_back_at: list[int] = []  # steps that led to rollbacks, without those that are forgotten
        self._remembered = max(REMEMBERED_STEPS, REMEMBERED_WINDOWS * config.spike_window)  # steps
        self._history: deque[tuple[int, str]] = deque(maxlen=config.max_interventions)  # step, cause
        self._loss = math.nan  # of the step under judgement, the same bits on all ranks
        self._spike: Spike | None = None  # that it is
        self._norms: list[tuple[str, float]] = []  # of its gradients
        self._loss_scaler: dict[str, float] = {}  # where fp16's loss scale stood at it
        self._has_trained = False  # whether a step was taken since the weights were loaded or made

    @property
    def judge(self) -> Judge:
        """For `Engine.train_step`."""
        return self

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON holds it."""
        return {
            "losses": list(self._losses),
            "skips_in_row": self._skips_in_row,
            "skips": self._skips,
            "rollbacks": self._rollbacks,
            "rolled_back_at": list(self._rolled_back_at),
            "history": [list(entry) for entry in self._history],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on as the run that saved `state`; nothing happens where there is none, in older checkpoints."""
        self._losses.extend(state.get("losses", []))
        self._skips_in_row = state.get("skips_in_row", 0)
        self._skips, self._rollbacks = state.get("skips", 0), state.get("rollbacks", 0)
        self._rolled_back_at = list(state.get("rolled_back_at", []))
        self._history.extend((step, cause) for step, cause in state.get("history", []))

    def rolled_back(self, state: dict[str, Any]) -> None:
        """After a checkpoint with `state` was loaded for `Action.ROLLBACK`: its window of losses, but our own counts.

        Its counts are from before the rollback, and would let a run roll back for ever. So that a crash forgets them
        no more than a rollback does, they belong into a checkpoint at once.
        """
        self._losses.clear()
        self._losses.extend(state.get("losses", []))
        self._skips_in_row, self._has_trained = 0, False

    def could_not_roll_back(self) -> None:
        """Where there is no checkpoint for `Action.ROLLBACK`: the step was skipped, and counts as that."""
        self._rollbacks -= 1
        self._rolled_back_at.pop()
        self._skips, self._skips_in_row = self._skips + 1, self._skips_in_row + 1

    def takes(self, loss: Callable[[], float]) -> bool:
        """Whether a step with finite gradients is taken."""
        if self._config.loss_spike == "ignore":
            return True
        self._loss = loss()
        if len(self._losses) < self._config.spike_window:
            return True
        window = np.array(self._losses)
        mean = float(window.mean())
        deviation = max(float(window.std()), ROUNDING * abs(mean))
        z_score = (self._loss - mean) / deviation
        if z_score <= self._config.spike_z_score:
            return True
        self._spike = Spike(z_score, mean, deviation, len(window))
        return False

    def examine(self) -> None:
        """Notes the gradients of a step that is not taken."""
        self._norms = blame.gradient_norms(self._engine)
        self._loss_scaler = loss_scaler_state(self._engine.deepspeed.optimizer)

    def after(self, step: int, result: StepResult, micro_batches: Sequence[MicroBatch]) -> Intervention | None:
        """What to do after a step that was not taken, None after one that was; collective, as the step was."""
        if result.taken:
            if self._config.loss_spike != "ignore":
                self._losses.append(self._loss)
            self._skips_in_row, self._has_trained = 0, True
            return None
        report = self._investigate(step, result, micro_batches)
        self._spike, self._norms = None, []
        self._history.append((step, report.cause))
        return self._decide(report)

    def _investigate(self, step: int, result: StepResult, micro_batches: Sequence[MicroBatch]) -> Report:
        testimonies = blame.testify(self._engine, result, micro_batches, self._norms)
        loss = blame.not_finite_first([one.step_loss for one in testimonies])
        suspects: tuple[Suspect, ...]
        if self._spike:
            suspects = (blame.highest_loss(testimonies),)
            largest = tuple(name for name, _ in blame.largest_gradients(testimonies, NAMED_GRADIENTS))
            documents = self._documents(suspects)
            return Report(step, "spike", loss, self._spike, suspects, parameters=largest, documents=documents)
        bad, count = blame.gradients_not_finite(testimonies)
        cause = self._cause(testimonies)
        if cause == "loss scale":
            scale = loss_scaler_state(self._engine.deepspeed.optimizer)["cur_scale"]
            return Report(step, cause, loss, parameters=tuple(bad), parameter_count=count, loss_scale=scale)
        if cause == "weights":
            return Report(step, cause, loss, suspects=tuple(blame.suspects(testimonies)))
        testimonies, came_again = blame.run_again(self._engine, micro_batches, testimonies, self._loss_scaler)
        suspects = tuple(blame.suspects(testimonies)) if came_again else ()
        if not suspects and cause == "loss":
            suspects = (blame.highest_loss(testimonies),)
        return Report(
            step,
            cause,
            loss,
            suspects=suspects,
            came_again=came_again,
            hosts=() if came_again else blame.hosts(testimonies, suspects),
            is_deterministic=self._engine.config.training.deterministic,
            parameters=tuple(bad) if cause == "gradients" else (),  # all are spoiled by a loss that is not finite
            parameter_count=count,
            documents=self._documents(suspects),
        )

    def _cause(self, testimonies: Sequence[Testimony]) -> Cause:
        if any(one.bad_weights for one in testimonies):
            return "weights"
        if not all(math.isfinite(loss) for one in testimonies for loss in one.losses):
            return "loss"
        # how fp16 finds its scale, unless it goes on and on
        is_search = self._skips_in_row + 1 < self._config.max_interventions
        return "loss scale" if is_search and loss_scale_can_fall(self._engine.deepspeed.optimizer) else "gradients"

    def _documents(self, suspects: Sequence[Suspect]) -> tuple[str, ...]:
        if self._documents_of is None:
            return ()
        samples = dict.fromkeys(sample for suspect in suspects for sample in suspect.samples)
        return tuple(dict.fromkeys(str(document) for sample in samples for document in self._documents_of(sample)))

    def _decide(self, report: Report) -> Intervention:
        policy, most = self._policy(report), self._config.max_interventions
        if policy == "stop":
            return Intervention(Action.STOP, report, self._why_stop(report))
        # after `could_not_roll_back` there may be too many skips already
        if policy == "rollback" and self._skips_in_row < most:
            # by the steps' numbers, which a run passes again after a rollback: only new ones are progress
            self._rolled_back_at = [at for at in self._rolled_back_at if report.step - at < self._remembered]
            if len(self._rolled_back_at) >= most:
                why = f"{most} rollbacks within {self._remembered} steps did not help"
                return Intervention(Action.STOP, report, self._summary(why))
            self._rolled_back_at.append(report.step)
            self._rollbacks += 1
            return Intervention(Action.ROLLBACK, report)
        self._skips, self._skips_in_row = self._skips + 1, self._skips_in_row + 1
        if self._skips_in_row >= most:
            return Intervention(Action.STOP, report, self._summary(f"{self._skips_in_row} steps in a row were skipped"))
        return Intervention(Action.SKIP, report)

    def _policy(self, report: Report) -> Policy:
        if report.cause == "loss scale":
            return "skip"
        policy = self._config.loss_spike if report.cause == "spike" else self._config.not_finite
        assert policy != "ignore"
        if report.cause == "weights" and (policy == "skip" or not self._has_trained):
            return "stop"  # no batch can mend them, and a checkpoint that was just loaded is as bad
        return policy

    def _why_stop(self, report: Report) -> str:
        if report.cause != "weights":
            return self._summary(f"guards.{'loss_spike' if report.cause == 'spike' else 'not_finite'} is stop")
        if self._has_trained:
            return self._summary("no step can mend weights that are not finite, go back to an earlier checkpoint")
        return self._summary("the weights that were loaded are not finite already, start from an earlier checkpoint")

    def _summary(self, why: str) -> str:
        causes = ", ".join(f"{step} ({cause})" for step, cause in self._history)
        return f"{why}; {self._skips} steps skipped and {self._rollbacks} rollbacks in all, the last at {causes}"
