"""Guards: a step with a loss spike or non-finite gradients changes no weight, and its cause is reported.

In: the engine's result of each step. Out: if the step was not taken, an `Intervention` that tells the loop what to do.
NaN and Inf are found by DeepSpeed's own check of the gradients at no cost; a spike is a z-score over the losses of the
last steps, for which each step has to wait for its loss. Every rank has a guard with the same inputs, so all decide
alike. Its `state` is saved in checkpoints: a resumed run decides as the uninterrupted one would have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from megalite.config.sections import GuardsConfig, Policy
from megalite.engine.batch_transfer import MicroBatch
from megalite.engine.deepspeed.loss_scale import can_fall, loss_scaler_state, named
from megalite.engine.engine import Engine
from megalite.engine.step_result import StepResult
from megalite.resilience import nonfinite_tracing as tracing
from megalite.resilience.nonfinite_tracing import LOSS, FaultCandidate, RankReport

Cause = Literal["loss", "gradients", "weights", "loss scale", "spike"]
NAMED = 3  # ranks, parameters, samples or documents in a sentence
KEPT = 64  # of each in the facts
ROUNDING = 1e-6  # relative to the mean: losses closer together than this differ by rounding only
NAMED_GRADIENTS = 3  # in the report of a spike
REMEMBERED_WINDOWS, REMEMBERED_STEPS = 10, 1000  # a rollback is forgotten after the longer of the two

DocumentsOf = Callable[[int], Iterable[object]]
"""Maps a sample number to the names of the documents it is packed from."""


class Action(StrEnum):
    """Actions of the loop after a step that changed nothing."""

    SKIP = "skip"  # go on with the next batch
    ROLLBACK = "rollback"  # go back to the last checkpoint, and on after the data that led here
    STOP = "stop"


@dataclass(frozen=True)
class Spike:
    """Statistics of a loss far above those of the last steps."""

    z_score: float
    mean: float
    standard_deviation: float
    window: int  # steps

    def __str__(self) -> str:
        return (
            f"{self.z_score:.1f} standard deviations ({self.standard_deviation:.3g}) above the mean {self.mean:.4g} of "
            f"the last {self.window} steps"
        )


@dataclass(frozen=True)
class SkipReport:
    """Cause and origin of a step that was not taken."""

    step: int
    cause: Cause
    loss: float
    spike: Spike | None = None
    suspects: tuple[FaultCandidate, ...] = ()
    came_again: bool | None = None  # whether a second run of the step was not finite either; None: no second run
    hosts: tuple[str, ...] = ()  # possible origins if it did not recur
    is_deterministic: bool = False  # whether the run's kernels are deterministic
    parameters: tuple[str, ...] = ()  # with non-finite gradients under a finite loss; for a spike, with the largest
    parameter_count: int = 0  # of the model
    documents: tuple[str, ...] = ()  # of which the suspects' samples consist
    loss_scale: float | None = None  # fp16's, lowered by this step

    @property
    def facts(self) -> dict[str, Any]:
        """Returns all fields as JSON; numbers that are not finite become strings."""
        suspects = [asdict(suspect) for suspect in self.suspects[:KEPT]]
        flat = [suspect | suspect.pop("place") for suspect in suspects]
        lists = {name: getattr(self, name)[:KEPT] for name in ("parameters", "documents", "hosts")}
        facts: dict[str, Any] = _json_able(asdict(self) | {"suspects": flat} | lists)
        return facts

    def __str__(self) -> str:
        parts = [f"step {self.step}: {self._what()}", self._parameters(), self._where(), self._second_run()]
        return "; ".join(filter(None, parts))

    def _what(self) -> str:
        match self.cause:
            case "spike":
                return f"the loss {self.loss:.4g} lies {self.spike}"
            case "weights":
                return "weights were not finite before it"
            case "loss":
                return "the loss is not finite"
            case "loss scale":
                return f"gradients overflowed fp16, whose loss scale is {self.loss_scale:g} now"
            case "gradients":
                return "the loss is finite, gradients are not"

    def _parameters(self) -> str:
        if not self.parameters:
            return ""
        if self.cause == "spike":
            return f"the largest gradients are those of {listed(self.parameters)}"
        count = f"{len(self.parameters)} of {self.parameter_count} parameters"
        return f"not finite are the gradients of {count} ({listed(self.parameters)})"

    def _where(self) -> str:
        if not self.suspects:
            return ""
        first = self.suspects[0]
        alike = [one for one in self.suspects if (one.where, one.micro_batch) == (first.where, first.micro_batch)]
        ranks = listed(suspect.place for suspect in alike)
        if first.phase == "weights":
            return f"{listed(dict.fromkeys(suspect.where for suspect in self.suspects))} on {ranks}"
        if self.cause == "spike":
            what = f"the highest loss, {first.loss:.4g} a token, is that of"
        elif first.phase == "backward":
            what = f"it began in the gradient of {first.where} in"
        else:
            what = f"it began in {first.where if first.where == LOSS else f'the output of {first.where}'} in"
        samples = f", samples {listed(first.samples)}" if first.samples else ""
        documents = f", which are {listed(self.documents)}" if self.documents else ""
        others = len(self.suspects) - len(alike)
        elsewhere = f", and in {others} other places" if others else ""
        return f"{what} micro-batch {first.micro_batch} on {ranks}{samples}{documents}{elsewhere}"

    def _second_run(self) -> str:
        if self.came_again and not self.suspects:
            return (
                "each micro-batch's gradients are finite on every rank, their sum over micro-batches and replicas, or "
                "its norm, is not"
            )
        if self.came_again is not False:
            return ""
        devices = f"the memory and the devices of {listed(self.hosts)}"
        if self.is_deterministic:
            return (
                "computed a second time the step was finite, so neither the data nor the program is to blame: suspect "
                f"{devices}"
            )
        return (
            f"computed a second time the step was finite: suspect {devices}, or, as training.deterministic is off, a "
            "kernel that does not always compute the same"
        )


def listed(things: Iterable[object]) -> str:
    """Formats the first few things and the number of the others."""
    names = [str(thing) for thing in things]
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join(names[:NAMED] + more)


def _json_able(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _json_able(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_able(item) for item in value]
    return value


@dataclass(frozen=True)
class Intervention:
    """Reports a step that changed nothing and the action that follows."""

    action: Action
    report: SkipReport
    summary: str = ""  # of the reason and the history, if the run stops

    @property
    def sentence(self) -> str:
        """The intervention as one sentence for the console."""
        return ": ".join(filter(None, (self.summary, str(self.report))))

    @property
    def facts(self) -> dict[str, Any]:
        """The intervention for events.jsonl, as JSON."""
        return self.report.facts | {"action": self.action.value, "sentence": self.sentence}


class Guard:
    """Decides which steps are taken (as the engine's `StepGate`) and what follows when one was not."""

    def __init__(self, engine: Engine, config: GuardsConfig, documents_of: DocumentsOf | None = None) -> None:
        self._engine, self._config, self._documents_of = engine, config, documents_of
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._skips_in_row = self._skips = self._rollbacks = 0
        self._rolled_back_at: list[int] = []  # steps that led to rollbacks, without those that are forgotten
        self._remembered = max(REMEMBERED_STEPS, REMEMBERED_WINDOWS * config.spike_window)  # steps
        self._history: deque[tuple[int, str]] = deque(maxlen=config.max_interventions)  # step, cause
        self._loss = math.nan  # of the current step, the same bits on all ranks
        self._spike: Spike | None = None  # of the current step, if it is one
        self._norms: list[tuple[str, float]] = []  # of the current step's gradients
        self._has_trained = False  # whether a step was taken since the weights were loaded or made

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {
            "losses": list(self._losses),
            "skips_in_row": self._skips_in_row,
            "skips": self._skips,
            "rollbacks": self._rollbacks,
            "rolled_back_at": list(self._rolled_back_at),
            "history": [list(entry) for entry in self._history],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned; empty in older checkpoints."""
        self._losses.extend(state.get("losses", []))
        self._skips_in_row = state.get("skips_in_row", 0)
        self._skips, self._rollbacks = state.get("skips", 0), state.get("rollbacks", 0)
        self._rolled_back_at = list(state.get("rolled_back_at", []))
        self._history.extend((step, cause) for step, cause in state.get("history", []))

    def rolled_back(self, state: dict[str, Any]) -> None:
        """Takes the window of losses from the `state` of a checkpoint that was rolled back to; keeps its own counts.

        The checkpoint's counts are older than the rollback, and would let a run roll back for ever. Save a
        checkpoint at once, so that a crash does not lose the counts either.
        """
        self._losses.clear()
        self._losses.extend(state.get("losses", []))
        self._skips_in_row, self._has_trained = 0, False

    def could_not_roll_back(self) -> None:
        """Counts the step as skipped, because there is no checkpoint for `Action.ROLLBACK`."""
        self._rollbacks -= 1
        self._rolled_back_at.pop()
        self._skips, self._skips_in_row = self._skips + 1, self._skips_in_row + 1

    @property
    def waits(self) -> bool:
        """True if each step has to wait for its loss, by which a spike is known."""
        return self._config.loss_spike != "ignore"

    def takes(self, loss: Callable[[], float]) -> bool:
        """Returns whether a step with finite gradients is taken."""
        if not self.waits:
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
        """Records the gradient norms of a step that is not taken."""
        self._norms = tracing.gradient_norms(self._engine)

    def after(self, step: int, result: StepResult, micro_batches: Sequence[MicroBatch]) -> Intervention | None:
        """Returns what to do after a step that was not taken, None after one that was. Collective."""
        if result.taken:
            if self.waits and self._loss != 0.0:  # 0: no token had a target
                self._losses.append(self._loss)
            self._skips_in_row, self._has_trained = 0, True
            return None
        if self._engine.decision.is_late(self):
            self._norms = tracing.late_gradient_norms(self._engine, result)
        report = self._investigate(step, result, micro_batches)
        self._spike, self._norms = None, []
        self._engine.decision.allow_updates()
        self._history.append((step, report.cause))
        return self._decide(report)

    def _investigate(self, step: int, result: StepResult, micro_batches: Sequence[MicroBatch]) -> SkipReport:
        rank_reports = tracing.gather_rank_reports(self._engine, result, micro_batches, self._norms)
        loss = tracing.not_finite_first([one.step_loss for one in rank_reports])
        norms = tracing.united_norms(rank_reports)
        candidates: tuple[FaultCandidate, ...]
        if self._spike:
            candidates = (tracing.highest_loss(rank_reports),)
            largest = tuple(sorted(norms, key=lambda name: -norms[name])[:NAMED_GRADIENTS])
            documents = self._documents(candidates)
            return SkipReport(step, "spike", loss, self._spike, candidates, parameters=largest, documents=documents)
        bad, count = [name for name, norm in norms.items() if math.isnan(norm)], len(norms)
        loss_scaler = named(result.loss_scaler)
        cause = self._cause(rank_reports, loss_scaler)
        if cause == "loss scale":
            scale = loss_scaler_state(self._engine.deepspeed.optimizer)["cur_scale"]
            return SkipReport(step, cause, loss, parameters=tuple(bad), parameter_count=count, loss_scale=scale)
        if cause == "weights":
            return SkipReport(step, cause, loss, suspects=tuple(tracing.candidates(rank_reports)))
        rank_reports, recurred = tracing.run_again(self._engine, micro_batches, rank_reports, loss_scaler)
        candidates = tuple(tracing.candidates(rank_reports)) if recurred else ()
        if not candidates and cause == "loss":
            candidates = (tracing.highest_loss(rank_reports),)
        return SkipReport(
            step,
            cause,
            loss,
            suspects=candidates,
            came_again=recurred,
            hosts=() if recurred else tracing.hosts(rank_reports, candidates),
            is_deterministic=self._engine.config.training.deterministic,
            parameters=tuple(bad) if cause == "gradients" else (),  # else all are
            parameter_count=count,
            documents=self._documents(candidates),
        )

    def _cause(self, rank_reports: Sequence[RankReport], loss_scaler: dict[str, float]) -> Cause:
        if any(one.bad_weights for one in rank_reports):
            return "weights"
        if not all(math.isfinite(loss) for one in rank_reports for loss in one.losses):
            return "loss"
        # overflows are how fp16 finds its scale, until there is no smaller one
        is_search = can_fall(self._engine.deepspeed.optimizer, loss_scaler.get("cur_scale", 0.0))
        return "loss scale" if is_search else "gradients"

    def _documents(self, candidates: Sequence[FaultCandidate]) -> tuple[str, ...]:
        if self._documents_of is None:
            return ()
        samples = dict.fromkeys(sample for candidate in candidates for sample in candidate.samples)
        return tuple(dict.fromkeys(str(document) for sample in samples for document in self._documents_of(sample)))

    def _decide(self, report: SkipReport) -> Intervention:
        policy, most = self._policy(report), self._config.max_interventions
        if report.cause == "loss scale":
            self._skips += 1  # none of those in a row: a search ends at the smallest scale
            return Intervention(Action.SKIP, report)
        if policy == "stop":
            return Intervention(Action.STOP, report, self._why_stop(report))
        # after `could_not_roll_back` the limit of skips may have been reached already
        if policy == "rollback" and self._skips_in_row < most:
            # by step numbers, which a run repeats after a rollback: only new ones are progress
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

    def _policy(self, report: SkipReport) -> Policy:
        policy = self._config.loss_spike if report.cause == "spike" else self._config.not_finite
        assert policy != "ignore"
        if report.cause == "weights" and (policy == "skip" or not self._has_trained):
            return "stop"  # no batch can repair weights, and a checkpoint that was just loaded has the same
        return policy

    def _why_stop(self, report: SkipReport) -> str:
        if report.cause != "weights":
            return self._summary(f"guards.{'loss_spike' if report.cause == 'spike' else 'not_finite'} is stop")
        if self._has_trained:
            return self._summary("no step can mend weights that are not finite, go back to an earlier checkpoint")
        return self._summary("the weights that were loaded are not finite already, start from an earlier checkpoint")

    def _summary(self, why: str) -> str:
        causes = ", ".join(f"{step} ({cause})" for step, cause in self._history)
        return f"{why}; {self._skips} steps skipped and {self._rollbacks} rollbacks in all, the last at {causes}"
