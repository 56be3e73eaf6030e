"""The interface of what takes part in every optimizer step beside the model and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.engine.batch_transfer import MicroBatch
from megalite.engine.step_decision import StepDecision


class StepParticipant:
    """Is told when a step begins and when the optimizer has stepped, or was kept from it."""

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Prepares for the forward and backward passes of the step, also of one that is run again for a report."""

    def after_step(self, decision: StepDecision) -> None:
        """Acts on what was decided about the step; collective where all ranks must."""
