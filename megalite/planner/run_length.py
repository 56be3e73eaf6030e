"""The length of a run: its steps, their time, and the accelerator-hours and the price of that time. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config import Config
from megalite.config.batch_stages import largest_shape
from megalite.units import duration, plural, short

HOUR_S, DAY_S = 3600.0, 86400.0
LEAST_GOODPUT = 1e-3  # below it a run takes a thousand times its steps, and is said never to end


@dataclass(frozen=True)
class RunLength:
    """The length of a run, or of what is left of it."""

    steps: int
    tokens: int
    step_s: float
    accelerators: int
    goodput: float = 1.0  # share of the wall time in steps that count; 1: saves and failures are not counted

    @property
    def training_s(self) -> float:
        """Seconds of all steps, without saves and failures."""
        return self.steps * self.step_s

    @property
    def wall_s(self) -> float:
        """Expected seconds from start to end; infinite where the goodput is below `LEAST_GOODPUT`."""
        return self.training_s / self.goodput if self.goodput >= LEAST_GOODPUT else math.inf

    @property
    def days(self) -> float:
        """Expected days from start to end."""
        return self.wall_s / DAY_S

    @property
    def accelerator_hours(self) -> float:
        """Hours of wall time times accelerators."""
        return self.wall_s / HOUR_S * self.accelerators

    def price(self, per_accelerator_hour: float) -> float:
        """Returns the price of all accelerator-hours, in the currency of `per_accelerator_hour`."""
        return self.accelerator_hours * per_accelerator_hour

    def __str__(self) -> str:
        """`71,526 steps, 300 billion tokens: 19.3 days, 14,827 accelerator-hours`."""
        if not self.ends:
            return f"{self.size}: never done, for failures come before a checkpoint is complete"
        return f"{self.size}: {duration(self.wall_s)}, {hours(self.accelerator_hours)}"

    @property
    def ends(self) -> bool:
        """False where failures throw away nearly all work."""
        return self.wall_s < math.inf

    @property
    def size(self) -> str:
        """Steps and tokens in words: `71,526 steps, 300 billion tokens`."""
        scales = ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1.0, ""))
        scale, word = next(((scale, word) for scale, word in scales if self.tokens >= scale), scales[-1])
        return f"{plural(self.steps, 'step')}, {short(self.tokens / scale)} {word}tokens"


def run_length(config: Config, step_s: float, accelerators: int, *, global_batch_size: int | None = None) -> RunLength:
    """Returns the length of the run of `config` where a step, the largest of all stages, takes `step_s` on
    `accelerators`.

    `global_batch_size`: sequences of that step where they are not the config's, as on more replicas of the same size;
    the run then has as many tokens in fewer steps.
    """
    own, planned = config.batches, largest_shape(config.training)
    tokens = own.tokens_after(config.total_steps)
    steps = -(-config.total_steps * planned.global_batch_size // (global_batch_size or planned.global_batch_size))
    if config.training.stages:  # a step of another stage is taken to need time in proportion to its tokens
        step_s *= tokens / (config.total_steps * planned.tokens)
    return RunLength(steps, tokens, step_s, accelerators)


def hours(accelerator_hours: float) -> str:
    """Formats accelerator-hours: `14,827 accelerator-hours`, `0.52 accelerator-hours`."""
    number = f"{accelerator_hours:,.0f}" if accelerator_hours >= 100 else f"{accelerator_hours:.2g}"
    return f"{number} accelerator-hours"
