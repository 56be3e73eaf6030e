"""What a checkpoint or a Hugging Face folder can do wrong to its reader, as one sentence."""

from __future__ import annotations


class CheckpointError(ValueError):
    """One sentence: what is wrong, where, and what to do."""
