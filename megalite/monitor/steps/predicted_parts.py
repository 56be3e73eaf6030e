"""The predicted parts of a step beside the measured ones. No torch.

The planner tells apart what a kernel is bound by, a measurement what a rank was doing: groups of both that mean the
same are compared. A tied embedding's exchange is predicted between stages and measured as synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megalite.monitor.steps.parts import PARTS

GROUPS = {
    "computing": (("matrix products", "attention", "memory-bound", "launches", "offloading"), ("forward", "backward")),
    "tensor collectives": (("tensor collectives",), ("tensor_collectives",)),
    "context collectives": (("context collectives",), ("context_collectives",)),
    "expert collectives": (("expert collectives",), ("expert_collectives",)),
    "waiting for a neighbour": (("pipeline bubble", "stage imbalance"), ("pipeline_wait",)),
    "transfers between stages": (("between stages",), ("pipeline_transfer",)),
    "synchronisation": (("replicas",), ("gradient_sync", "weights_sync")),
    "optimizer": (("optimizer",), ("optimizer",)),
}
"""Names of the predicted parts of a step, as in megalite/planner/cost/step_time.py, and of the measured ones."""

UNPREDICTED = tuple(part for part in PARTS if not any(part in measured for _, measured in GROUPS.values()))
"""Parts of a step that the planner takes to need no time."""


class PartPair(NamedTuple):
    """A part of the step as it was predicted and as it was measured."""

    name: str
    predicted_s: float | None  # None: there is no prediction of it
    measured_s: float


def beside_prediction(predicted_s: Mapping[str, float], measured_s: Mapping[str, float]) -> list[PartPair]:
    """Returns the groups, and each part without a prediction that took any time; the measured ones add up to the step.

    A group that is neither predicted nor measured is left out. `predicted_s` is empty where there is no prediction.
    """
    pairs = []
    for name, (predicted, measured) in GROUPS.items():
        expected_s = sum(predicted_s.get(part, 0.0) for part in predicted) if predicted_s else None
        took_s = sum(measured_s.get(part, 0.0) for part in measured)
        if expected_s or took_s:
            pairs.append(PartPair(name, expected_s, took_s))
    others = {PARTS[part]: measured_s.get(part, 0.0) for part in UNPREDICTED}
    return pairs + [PartPair(name, None, took_s) for name, took_s in others.items() if took_s]
