"""Section `checkpoint`: when the run's state is saved, and whether an existing one is continued."""

from __future__ import annotations

from megalite.config.base import NonNegativeInt, Section


class CheckpointConfig(Section):
    """Checkpoints in `run_dir/checkpoints`; any of them resumes on any layout."""

    interval: NonNegativeInt = 0
    """Steps between checkpoints; 0 = only at the end."""

    save_last: bool = True
    """Save a checkpoint after the last step."""

    resume: bool = True
    """Continue from the newest complete checkpoint in `run_dir`, if there is one."""
