"""The learning rate as a pure function of the step, so that no scheduler has a state to save."""

from __future__ import annotations

import math

from megalite.config.sections import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Returns the factor on the peak learning rate for step 0, 1, ... `total_steps - 1`.

    Warm-up rises linearly and reaches the peak in its last step; the shapes after it end at
    `min_learning_rate_ratio` in the run's last step (cosine: Loshchilov & Hutter 2017; wsd: Hu 2024, MiniCPM).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    low = schedule.min_learning_rate_ratio
    match schedule.name:
        case "constant":
            return 1.0
        case "wsd":
            decay = schedule.wsd_decay_steps(total_steps)
            return 1.0 - (1.0 - low) * _progress(step, total_steps - 1 - decay, total_steps)
        case "linear":
            return 1.0 - (1.0 - low) * _progress(step, schedule.warmup_steps, total_steps)
        case "cosine":
            turned = math.pi * _progress(step, schedule.warmup_steps, total_steps)
            return low + (1.0 - low) * 0.5 * (1.0 + math.cos(turned))


def _progress(step: int, start: int, total_steps: int) -> float:
    """0 before and in step `start`, 1 in the last step, linear in between."""
    return min(1.0, max(0.0, (step - start) / max(1, total_steps - 1 - start)))
