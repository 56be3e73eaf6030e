"""Errors about checkpoints, Hugging Face folders and stores; their messages are one sentence."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be read or written: what is wrong, where, and what to do."""


class StorageError(CheckpointError):
    """Raised if a store fails; the checkpoints on it may be sound.

    `is_lasting`: a retry helps only after a user has changed something (a bucket, a permission, a disk).
    """

    def __init__(self, sentence: str, *, is_lasting: bool = False) -> None:
        super().__init__(sentence)
        self.is_lasting = is_lasting
