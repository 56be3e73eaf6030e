"""Errors of the meeting of ranks and of their messages, which a caller reports in one sentence. No torch."""

from __future__ import annotations


class RendezvousFailed(RuntimeError):
    """The ranks of a run did not meet; starting again may help."""


class MessageRefused(RuntimeError):
    """A rank sent something other than what all ranks agreed to exchange; nothing of it is used."""
