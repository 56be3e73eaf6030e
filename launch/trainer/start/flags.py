"""Flags with which a user insists on a start. They are no options of the config: they belong to one command.

A command hands them on to the ranks that it starts, among the arguments of `launch.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORCE, ALLOW_CHANGE, SHARED_RUN_DIR = "--force", "--allow-change", "--shared-run-dir"


@dataclass(frozen=True)
class StartFlags:
    """The flags of one start."""

    force: bool = False  # start although the predicted memory does not fit
    allow_change: bool = False  # resume although options have changed that give the checkpoint another meaning
    shared_run_dir: bool = False  # start in a folder that others own, or that a group may write

    @property
    def words(self) -> list[str]:
        """The flags that are set, as arguments of a rank."""
        given = {FORCE: self.force, ALLOW_CHANGE: self.allow_change, SHARED_RUN_DIR: self.shared_run_dir}
        return [word for word, is_set in given.items() if is_set]


NO_FLAGS = StartFlags()


def split_flags(arguments: Sequence[str]) -> tuple[StartFlags, list[str]]:
    """Separates the flags from the other arguments of a rank, whose order stays."""
    words = (FORCE, ALLOW_CHANGE, SHARED_RUN_DIR)
    others = [argument for argument in arguments if argument not in words]
    return StartFlags(*(word in arguments for word in words)), others
