"""A run's state beside the engine's weights and optimizer, its learning rate, and the exceptions that end it early.

No torch: a rank imports the exceptions before anything else.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict

from megalite.config.sections import ScheduleConfig


class TrainState(BaseModel):
    """Progress of a run after `step` optimizer steps, skipped ones included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = 0
    consumed_samples: int = 0  # the data's only position: sample k is a pure function of (fingerprint, seed, k)
    tokens_seen: int = 0
    skipped_steps: int = 0  # steps that changed nothing: not finite, or refused by a guard
    excluded_samples: tuple[tuple[int, int], ...] = ()  # [first, stop) ranges that rollbacks have excluded
    guard: dict[str, Any] = {}  # state of megalite.resilience.guards.Guard
    source_losses: dict[str, tuple[float, int]] = {}  # megalite.monitor.source_losses.Sums that no record tells yet
    data_fingerprint: str = ""
    data_content: str = ""  # digest of some tokens of a text without metadata, of which the fingerprint knows lengths
    data_mix: dict[str, Any] = {}  # sources and stages so far, of data_pipeline.samples.mix.MixRecord; empty: one text
    seed: int = 0

    def after(self, *, samples: int, tokens: int, skipped: bool) -> TrainState:
        """Returns the state one step later."""
        more = {"step": 1, "consumed_samples": samples, "tokens_seen": tokens, "skipped_steps": int(skipped)}
        return self.model_copy(update={name: getattr(self, name) + count for name, count in more.items()})

    def rolled_back(self, to: TrainState) -> TrainState:
        """Returns the state `to` of a checkpoint, but past the samples consumed since.

        PaLM (arXiv:2204.02311, section 5.1) went around its loss spikes in this way; training from there on other data
        did not bring them back.
        """
        excluded = (*to.excluded_samples, (to.consumed_samples, self.consumed_samples))
        # the mix of this run may have been given another future than that of the checkpoint
        ours = ("consumed_samples", "data_fingerprint", "data_content", "data_mix")
        kept = {name: getattr(self, name) for name in ours}
        return to.model_copy(update=kept | {"excluded_samples": excluded})


def learning_rate_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Returns the factor on the peak learning rate for step 0, 1, ... `total_steps - 1`.

    Warm-up rises linearly and reaches the peak in its last step; the shapes after it end at
    `min_learning_rate_ratio` in the run's last step (cosine: Loshchilov & Hutter 2017; wsd: Hu 2024, MiniCPM). The only
    step of a run of one is at the peak.
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
    """Returns 0 up to step `start`, 1 in the last step unless it is the only one, and rises linearly in between."""
    last = total_steps - 1
    if step == last:
        return float(last > 0)
    return max(0.0, (step - start) / (last - start))


# Exceptions: one sentence each, the same on all ranks.


class TrainingStopped(RuntimeError):
    """A guard ended the run."""


class TrainingPreempted(RuntimeError):
    """The run was asked to end, and its state is saved."""


class TrainingInterrupted(TrainingPreempted):
    """A person asked the run to end with Ctrl-C, and its state is saved."""


class SaveFailed(RuntimeError):
    """The run ended and its state could not be saved."""
