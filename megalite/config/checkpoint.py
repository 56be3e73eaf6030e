"""Section `checkpoint`: when the run's state is saved, what is kept, and whether an existing one is continued."""

from __future__ import annotations

from typing import Literal

from megalite.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class CheckpointConfig(Section):
    """Checkpoints in `run_dir/checkpoints`; any of them resumes on any layout."""

    interval: NonNegativeInt | Literal["auto"] = 0
    """Steps between checkpoints; 0 = only at the end; `auto` = what loses least time, by measured costs and failures."""

    mean_hours_between_failures: PositiveFloat | None = None
    """For `interval: auto`: how long the job runs until something breaks. Left out: observed in this run's folder."""

    save_last: bool = True
    """Save a checkpoint after the last step."""

    resume: bool = True
    """Continue from the newest complete checkpoint in `run_dir`, or in `mirror` where `run_dir` has none."""

    background: bool = True
    """Write files while training goes on: a step waits only until its state is copied to host memory."""

    keep_last: NonNegativeInt = 10
    """How many of the newest checkpoints stay; 0 = all."""

    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are a multiple of this stay for good; 0 = none."""

    keep_best: NonNegativeInt = 0
    """How many checkpoints of the lowest evaluation loss stay."""

    mirror: str | None = None
    """Any fsspec URL (`s3://bucket/run`, `gs://...`, `file:///...`): finished checkpoints are copied there."""

    mirror_wait_minutes: NonNegativeFloat = 30
    """How long the end of a run waits for the mirror to have the last checkpoint."""
