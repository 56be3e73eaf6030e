"""Reports a step that changed nothing: one or two sentences for the console, all facts for events.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megalite.resilience.nonfinite_tracing import LOSS, FaultCandidate

Cause = Literal["loss", "gradients", "weights", "loss scale", "spike"]
NAMED = 3  # ranks, parameters, samples or documents in a sentence
KEPT = 64  # of each in the facts


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
