"""Section `optimizer`: the update rule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megalite.config.base import NonNegativeFloat, NotBool, PositiveFloat, Section

Beta = Annotated[float, NotBool, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """Update rule; its learning rate is the peak that the schedule scales."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule: AdamW, or plain SGD without momentum (for tests: AdamW hides errors of gradient scale)."""

    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment; ignored by sgd."""

    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the root of the second moment; ignored by sgd."""

    weight_decay: NonNegativeFloat = 0.1
    """Decay of the matrices per step, times the learning rate; norms and biases never decay."""
