"""Exceptions that end a run early or without its last checkpoint: one sentence each, the same on all ranks."""

from __future__ import annotations


class TrainingStopped(RuntimeError):
    """A guard ended the run."""


class TrainingPreempted(RuntimeError):
    """The run was asked to end, and its state is saved."""


class SaveFailed(RuntimeError):
    """The run ended and its state could not be saved."""
