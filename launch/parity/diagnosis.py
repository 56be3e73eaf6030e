"""Diagnoses a failing layout: the axes that cause it, the first layer that differs, factors, known defects.

In: a failing result and a function that runs other layouts. Out: sentences for people, and the axes for programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from launch.parity.comparison import SCALARS, Deviation, ReferenceAnswer, worst
from launch.parity.layout import ParityLayout
from launch.parity.observations import BEFORE, FIRST_STEP, REDUCTION, SOURCE_LOSS, Quantity

AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "dp": "data parallelism",
    "cp": "context parallelism",
    "cp_kind": "the kind of context parallelism",
    "ep": "expert parallelism",
    "zero": "ZeRO sharding",
    "sequence_parallel": "sequence parallelism",
    "recompute": "recomputation",
    "accumulation": "gradient accumulation",
    "schedule": "the pipeline schedule",
    "chunks": "the number of chunks",
    "compile": "compilation",
}
OFF_FIRST = (
    *("compile", "chunks", "schedule", "recompute", "accumulation"),
    *("zero", "sequence_parallel", "ep", "cp_kind", "cp", "pp", "dp", "tp"),
)
OF_16_BITS = 0.03  # an error of fewer than eight roundings to bf16, which are 0.004 each
NEEDS = {  # axis -> axes without which it has no effect
    "sequence_parallel": {"tp"},
    "zero": {"dp"},
    "cp_kind": {"cp"},
    "ep": {"dp", "cp"},
    "schedule": {"pp", "accumulation"},
    "chunks": {"pp", "accumulation", "schedule"},
}


@dataclass(frozen=True)
class LayoutResult:
    """The result of one layout in one number format."""

    layout: ParityLayout
    dtype: str
    seconds: float
    deviations: tuple[Deviation, ...] = ()
    disagreements: tuple[str, ...] = ()  # ranks that hold different copies of the same numbers
    crash: str | None = None  # why the ranks did not finish, in a sentence
    traceback: str = ""  # of the rank that failed
    first_norms: Mapping[str, float] = field(default_factory=dict)  # training -> gradient norm of its first step

    @property
    def passed(self) -> bool:
        return not self.crash and not self.disagreements and not self.failures

    @property
    def failures(self) -> list[Deviation]:
        return [deviation for deviation in self.deviations if not deviation.passed]


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failure."""

    axes: tuple[str, ...]  # axes that the failure needs; none: it occurs on one process
    smallest: ParityLayout  # the layout with nothing but these axes
    sentences: tuple[str, ...]

    def explains(self, layout: ParityLayout) -> bool:
        """True if `layout` has all the axes that this failure needs."""
        return all(layout.axes.get(axis) == value for axis, value in self.smallest.axes_on.items())


def diagnose(
    result: LayoutResult, run: Callable[[ParityLayout], LayoutResult], answer: ReferenceAnswer, known_bad: Sequence[str]
) -> Diagnosis:
    """Switches axes off one at a time while the failure remains, and describes the smallest failing layout."""
    failing = _smallest(result, run)
    smallest = failing.layout
    needed = {axis for other in smallest.axes_on for axis in NEEDS.get(other, ())}
    axes = tuple(axis for axis in smallest.axes_on if axis not in needed)
    sentences = [_axes_sentence(axes, failing)]
    if failing.crash:
        sentences.append(failing.crash)
    else:
        sentences += [*failing.disagreements[:3], *_first_difference(failing)]
        sentences += [*_factor(failing), *_norm(failing, answer)]
    sentences += [f"known: {row}" for row in known_bad]
    return Diagnosis(axes, smallest, tuple(sentences))


def _smallest(failing: LayoutResult, run: Callable[[ParityLayout], LayoutResult]) -> LayoutResult:
    """Returns a failing layout that passes when any one of its axes is switched off."""
    for axis in OFF_FIRST:
        if axis in failing.layout.axes_on:
            without = run(failing.layout.without(axis))
            if not without.passed:
                return _smallest(without, run)
    return failing


def _axes_sentence(axes: tuple[str, ...], failing: LayoutResult) -> str:
    if not axes and failing.crash:
        return "one process alone does not finish, whatever the layout"
    if not axes:
        return "one process alone fails: the model, the loss or the optimizer differs, whatever the layout"
    names = " together with ".join(AXES[axis] for axis in axes)
    without = "without it" if len(axes) == 1 else "without any one of them"
    return f"caused by {names}: {failing.layout} fails, and passes {without}"


def _first_difference(result: LayoutResult) -> list[str]:
    """Names the first quantity that differs in the order of computation; later steps repeat the first one's errors."""
    by_kind: dict[str, list[Deviation]] = {}  # of the first step, and what is compared only after the last one
    for failure in result.failures:
        kind, name, step = failure.quantity.kind, failure.name, failure.quantity.step
        if step == 1 and (kind == SOURCE_LOSS or kind not in SCALARS or name in (FIRST_STEP, BEFORE)):
            by_kind.setdefault(kind, []).append(failure)
    found = _in_forward(result.layout, by_kind) or _in_backward(by_kind)
    return [found] if found else _later(result.failures, by_kind)


def _in_forward(layout: ParityLayout, by_kind: Mapping[str, list[Deviation]]) -> str | None:
    if "activation" in by_kind:
        return f"forward: the first layer whose output differs is {by_kind['activation'][0].name}"
    for kind in ("logits", "loss", "evaluation loss"):
        if kind in by_kind:
            if kind != "logits" and layout.accumulation > 1:  # with one it passes, or the layout would be smaller
                return _between_micro_batches(kind, also="evaluation loss" in by_kind)
            if kind != "logits" and layout.axes_on.keys() & {"schedule", "chunks"}:
                return (
                    f"forward: outputs and logits agree, the {kind} under the schedule does not: look at the order of "
                    "its passes and at their messages, not at the output head"
                )
            return f"forward: all layers' outputs agree, the {kind} does not: look at the output head and its loss"
    if SOURCE_LOSS in by_kind:
        return f"forward: the loss agrees, that of {by_kind[SOURCE_LOSS][0].name} does not: look at how it is summed"
    return None


def _in_backward(by_kind: Mapping[str, list[Deviation]]) -> str | None:
    if REDUCTION in by_kind:
        most = worst(by_kind[REDUCTION])
        return (
            "reduction: the optimizer does not get the mean of the gradients that backward computed for micro-batches "
            f"and replicas: that of {most.name} is off by {most.error:.1e}, rounding in the stated formats explains "
            f"{most.bound:.1e}" + (", and a sum in 16 bits the rest" if most.error < OF_16_BITS else "")
        )
    if "gradient" in by_kind:
        count, first = len(by_kind["gradient"]), by_kind["gradient"][-1].name
        return f"backward: the forward pass agrees, {count} gradients differ, nearest to the loss that of {first}"
    if "gradient norm" in by_kind:
        return "norm: all gradients agree, their global norm does not, and so clipping is wrong"
    return None


def _later(failures: Sequence[Deviation], by_kind: Mapping[str, list[Deviation]]) -> list[str]:
    """Describes what differs where the first step agrees; gradients of later steps are known in a deep problem."""
    sentences = []
    if later := [failure for failure in failures if failure.quantity.step > 1]:
        number = min(failure.quantity.step for failure in later)
        later = [failure for failure in later if failure.quantity.step == number]
        first = worst([failure for failure in later if failure.quantity.kind == REDUCTION] or later)
        sentences = [
            f"step {number}: gradients agree until then, {first.quantity} of {first.name} does not: look at what the "
            "update before it has changed, at what a step leaves behind, and at what this step's batch has of its own"
        ]
    elif failures and not by_kind:
        return [f"later: the first step agrees, the {failures[0].quantity} of {failures[0].name} does not"]
    if moved := [failure for failures_of in by_kind.values() for failure in failures_of]:
        most = worst(moved)
        sentences.append(
            f"update: gradients and their norm agree{' in step 1' if later else ''}, the {most.quantity} does not, "
            f"most of all that of {most.name}"
        )
    return sentences


def _between_micro_batches(kind: str, *, also: bool) -> str:
    """Describes outputs that agree, of one micro-batch at a time, and a loss over several that does not, perhaps `also`
    in an evaluation."""
    where = "nor does an evaluation's" if also else "but an evaluation's does, which runs forward alone"
    return (
        f"between micro-batches: the outputs and logits of each alone agree, the {kind} over several does not"
        f"{f', {where}' if kind == 'loss' else ''}: look at what one could take from another, as messages, positions, "
        "masks and sums, not at the output head"
    )


def _factor(result: LayoutResult) -> list[str]:
    """Recognises a missed or doubled reduction by its whole factor."""
    for kind in ("gradient", "weight", "exp_avg", "loss"):
        for failure in result.failures:
            if failure.quantity.kind == kind and (ratio := failure.ratio) is not None:
                factor = round(max(ratio, 1 / ratio))
                axes = ("tp", "pp", "dp", "cp", "ep", "accumulation")
                sizes = " or ".join(axis for axis in axes if getattr(result.layout, axis) == factor)
                hint = f", which is the size of {sizes}" if sizes else ""
                times, cause = (
                    (f"1/{factor}", "missed or taken twice as a mean")
                    if ratio < 1
                    else (str(factor), "done twice, or a mean missed")
                )
                return [f"the {kind} of {failure.name} is {times} of the reference{hint}: a sum is {cause}"]
    return []


def _norm(result: LayoutResult, answer: ReferenceAnswer) -> list[str]:
    """Names the parameter whose square is missing from the norm or counted twice, if only the norm is wrong."""
    wrong = {(failure.quantity.kind, failure.name) for failure in result.failures if failure.quantity.step == 1}
    if ("gradient norm", FIRST_STEP) not in wrong or any(kind == "gradient" for kind, _ in wrong):
        return []
    for quantity, gradients in answer.truth.items():
        if quantity.kind != "gradient":
            continue
        truth = float(answer.truth[Quantity(quantity.training, "gradient norm")][FIRST_STEP][0])
        seen = result.first_norms[quantity.training]
        missing = truth**2 - seen**2
        for name, gradient in gradients.items():
            square = float(np.square(gradient).sum())
            if square and math.isclose(abs(missing), square, rel_tol=1e-3):
                return [f"the square of {name}'s gradient is {'left out' if missing > 0 else 'counted twice'}"]
        return [f"its square is {seen**2 / truth**2:.4f} of the reference's: parameters are left out or counted twice"]
    return []
