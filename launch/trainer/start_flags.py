"""Flags with which a user insists on a start. They are no options of the config: they belong to one command.

A command hands them on to the ranks that it starts, among the arguments of `launch.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORCE, ALLOW_CHANGE = "--force", "--allow-change"


@dataclass(frozen=True)
class StartFlags:
    """The flags of one start."""

    force: bool = False  # start although the predicted memory does not fit
    allow_change: bool = False  # resume although options have changed that give the checkpoint another meaning

    @property
    def words(self) -> list[str]:
        """The flags that are set, as arguments of a rank."""
        return [FORCE] * self.force + [ALLOW_CHANGE] * self.allow_change


NO_FLAGS = StartFlags()


def split_flags(arguments: Sequence[str]) -> tuple[StartFlags, list[str]]:
    """Separates the flags from the other arguments of a rank, whose order stays."""
    others = [argument for argument in arguments if argument not in (FORCE, ALLOW_CHANGE)]
    return StartFlags(FORCE in arguments, ALLOW_CHANGE in arguments), others
