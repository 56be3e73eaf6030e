"""Section `guards`: what happens to a step whose loss or gradients are not what they should be."""

from __future__ import annotations

from typing import Literal

from megalite.config.base import PositiveFloat, PositiveInt, Section

Policy = Literal["skip", "rollback", "stop"]


class GuardsConfig(Section):
    """Bad steps are caught before they change a weight.

    `skip` leaves the weights as they are and goes on with the next batch; `rollback` returns to the last checkpoint
    and goes on behind the offending data, or skips where there is none yet; `stop` ends the run.
    """

    not_finite: Policy = "skip"
    """For NaN or Inf in the loss or the gradients."""

    loss_spike: Literal["ignore"] | Policy = "ignore"
    """For a loss far above those of the last steps."""

    spike_z_score: PositiveFloat = 6.0
    """How many standard deviations above the window's mean a loss is a spike."""

    spike_window: PositiveInt = 100
    """Steps whose losses are the measure; no loss is a spike before there are that many."""

    max_interventions: PositiveInt = 10
    """Skips in a row, or rollbacks within 10 `spike_window`s (1000 steps at least), after which the run stops."""
