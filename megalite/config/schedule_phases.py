"""The phases of a learning-rate schedule in its unit: steps, or tokens where the config states one of them in tokens.

By tokens a step of twice the batch goes twice as far: `training.stages` stretch neither warm-up nor decay. Where all
steps have one batch both units give the same rates.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from megalite.config.batch_stages import BatchSchedule
from megalite.config.sections import ScheduleConfig

WARMUPS_BY_TOKENS = ("warmup_tokens", "warmup_samples", "warmup_epochs")
BY_TOKENS = (*WARMUPS_BY_TOKENS, "decay_tokens")
"""Options of `schedule` any of which makes it go by tokens."""


class SchedulePhases(NamedTuple):
    """Lengths of phases, and the end of the run, in steps or in tokens."""

    by_tokens: bool
    warmup: int
    decay: int  # of wsd
    last: int  # place at which the run's last step begins
    end: int


def stated_by_tokens(schedule: ScheduleConfig) -> list[str]:
    """Returns the options that are stated and make the schedule go by tokens."""
    return [name for name in BY_TOKENS if getattr(schedule, name) is not None]


def phases_of(
    schedule: ScheduleConfig, batches: BatchSchedule, total_steps: int, samples_per_epoch: int | None
) -> SchedulePhases | None:
    """Returns the phases of a run; None if they are in epochs and the samples of one are not known."""
    if not stated_by_tokens(schedule):
        decay = schedule.wsd_decay_steps(total_steps)
        return SchedulePhases(False, schedule.warmup_steps, decay, total_steps - 1, total_steps)
    samples = schedule.warmup_samples or 0
    if schedule.warmup_epochs is not None:
        if samples_per_epoch is None:
            return None
        samples = ceil(schedule.warmup_epochs * samples_per_epoch)
    warmup = schedule.warmup_tokens or samples * batches.sample_length
    last, end = batches.tokens_after(total_steps - 1), batches.tokens_after(total_steps)
    return SchedulePhases(True, warmup, schedule.decay_tokens or max(1, end // 10), last, end)
