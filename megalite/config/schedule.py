"""Section `schedule`: the learning rate over the run. The function itself lives in `megalite.training`."""

from __future__ import annotations

from typing import Literal

from megalite.config.base import Fraction, NonNegativeInt, PositiveInt, Section


class ScheduleConfig(Section):
    """Linear warm-up, then one of four shapes."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd (warm-up, stable, decay) is constant until the last `decay_steps`."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak; a shorter run (a smoke test) ends on the way."""

    min_learning_rate_ratio: Fraction = 0.1
    """Learning rate at the end of the run, as a fraction of the peak; ignored by constant."""

    decay_steps: PositiveInt | None = None
    """wsd only: length of the final decay in steps. Left out: a tenth of the run."""

    def wsd_decay_steps(self, total_steps: int) -> int:
        """Length in steps of wsd's final decay in a run of `total_steps`."""
        return self.decay_steps if self.decay_steps is not None else max(1, total_steps // 10)
