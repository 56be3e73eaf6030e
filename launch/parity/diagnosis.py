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
from launch.parity.observations import BEFORE, FIRST_STEP, Quantity

AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "dp": "data parallelism",
    "zero": "ZeRO sharding",
    "sequence_parallel": "sequence parallelism",
    "recompute": "recomputation",
    "accumulation": "gradient accumulation",
}
OFF_FIRST = ("recompute", "accumulation", "zero", "sequence_parallel", "pp", "dp", "tp")
NEEDS = {"sequence_parallel": "tp", "zero": "dp"}  # axis -> axis without which it has no effect


@dataclass(frozen=True)
class LayoutResult:
    """The result of one layout in one number format."""

    layout: ParityLayout
    dtype: str
    seconds: float
    findings: tuple[Deviation, ...] = ()
    disagreements: tuple[str, ...] = ()  # ranks that hold different copies of the same numbers
    crash: str | None = None  # why the ranks did not finish, in a sentence
    traceback: str = ""  # of the rank that failed
    first_norms: Mapping[str, float] = field(default_factory=dict)  # training -> gradient norm of its first step

    @property
    def passed(self) -> bool:
        return not self.crash and not self.disagreements and all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> list[Deviation]:
        return [finding for finding in self.findings if not finding.passed]


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failure."""

    axes: tuple[str, ...]  # axes that the failure needs; none: it occurs on one process
    smallest: ParityLayout  # the layout with nothing but these axes
    sentences: tuple[str, ...]

    def explains(self, layout: ParityLayout) -> bool:
        """True if `layout` has all the axes that this failure needs."""
        return all(layout.axes.get(axis) == value for axis, value in self.smallest.axes.items())


def diagnose(
    verdict: LayoutResult,
    run: Callable[[ParityLayout], LayoutResult],
    answer: ReferenceAnswer,
    known_bad: Sequence[str],
) -> Diagnosis:
    """Switches axes off one at a time while the failure remains, and describes the smallest failing layout."""
    failing = _smallest(verdict, run)
    smallest = failing.layout
    axes = tuple(axis for axis in smallest.axes if axis not in {NEEDS.get(other) for other in smallest.axes})
    sentences = [_axes_sentence(axes, failing)]
    if failing.crash:
        sentences.append(failing.crash)
    else:
        sentences += [*failing.disagreements[:3], *_where(failing), *_factor(failing), *_norm(failing, answer)]
    sentences += [f"known: {row}" for row in known_bad]
    return Diagnosis(axes, smallest, tuple(sentences))


def _smallest(failing: LayoutResult, run: Callable[[ParityLayout], LayoutResult]) -> LayoutResult:
    """Returns a failing layout that passes when any one of its axes is switched off."""
    for axis in OFF_FIRST:
        if axis in failing.layout.axes:
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


def _where(verdict: LayoutResult) -> list[str]:
    """Names the first quantity that differs in the order of computation; later steps repeat the first one's errors."""
    by_kind: dict[str, list[Deviation]] = {}
    for finding in verdict.failures:
        if finding.quantity.kind not in SCALARS or finding.name in (FIRST_STEP, BEFORE):
            by_kind.setdefault(finding.quantity.kind, []).append(finding)
    if not verdict.failures:
        return []
    if "activation" in by_kind:
        return [f"forward: the first layer whose output differs is {by_kind['activation'][0].name}"]
    for kind in ("logits", "loss", "evaluation loss"):
        if kind in by_kind:
            return [f"forward: all layers' outputs agree, the {kind} does not: look at the output head and its loss"]
    if "gradient" in by_kind:
        count, first = len(by_kind["gradient"]), by_kind["gradient"][-1].name
        return [f"backward: the forward pass agrees, {count} gradients differ, nearest to the loss that of {first}"]
    if "gradient norm" in by_kind:
        return ["norm: all gradients agree, their global norm does not, and so clipping is wrong"]
    arrays = [finding for finding in verdict.failures if finding.quantity.kind not in SCALARS]
    if not arrays:
        later = verdict.failures[0]
        return [f"later: the first step agrees, the {later.quantity} of {later.name} does not"]
    moved = worst(arrays)
    return [f"update: gradients and their norm agree, the {moved.quantity} does not, most of all that of {moved.name}"]


def _factor(verdict: LayoutResult) -> list[str]:
    """Recognises a missed or doubled reduction by its whole factor."""
    for kind in ("gradient", "weight", "exp_avg", "loss"):
        factors = [f for f in verdict.failures if f.quantity.kind == kind and f.ratio is not None]
        if factors:
            ratio, layout = factors[0].ratio, verdict.layout
            assert ratio is not None
            times = str(round(ratio)) if ratio > 1 else f"1/{round(1 / ratio)}"
            sizes = [
                axis
                for axis in ("tp", "pp", "dp", "accumulation")
                if getattr(layout, axis) == round(max(ratio, 1 / ratio))
            ]
            hint = f", which is the size of {' or '.join(sizes)}" if sizes else ""
            what = "missed or taken twice as a mean" if ratio < 1 else "done twice, or a mean missed"
            return [f"the {kind} of {factors[0].name} is {times} of the reference{hint}: a sum is {what}"]
    return []


def _norm(verdict: LayoutResult, answer: ReferenceAnswer) -> list[str]:
    """Names the parameter whose square is missing from the norm or counted twice, if only the norm is wrong."""
    wrong = {(finding.quantity.kind, finding.name) for finding in verdict.failures}
    if ("gradient norm", FIRST_STEP) not in wrong:
        return []
    if any(kind == "gradient" for kind, _ in wrong):
        return []
    for quantity, gradients in answer.truth.items():
        if quantity.kind != "gradient":
            continue
        truth = float(answer.truth[Quantity(quantity.training, "gradient norm")][FIRST_STEP][0])
        seen = verdict.first_norms[quantity.training]
        missing = truth**2 - seen**2
        for name, gradient in gradients.items():
            square = float(np.square(gradient).sum())
            if square and math.isclose(abs(missing), square, rel_tol=1e-3):
                return [f"the square of {name}'s gradient is {'left out' if missing > 0 else 'counted twice'}"]
        return [f"its square is {seen**2 / truth**2:.4f} of the reference's: parameters are left out or counted twice"]
    return []
