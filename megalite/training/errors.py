"""How a run ends before its last step."""

from __future__ import annotations


class TrainingStopped(RuntimeError):
    """A guard ended the run; one sentence."""
