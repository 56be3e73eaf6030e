"""How a run ends before its last step, or without its last checkpoint; each is one sentence, the same on all ranks."""

from __future__ import annotations


class TrainingStopped(RuntimeError):
    """A guard ended the run."""


class TrainingPreempted(RuntimeError):
    """The run was asked to end, and its state is saved."""


class SaveFailed(RuntimeError):
    """The run ended and its state could not be saved."""
