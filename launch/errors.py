"""Errors that a user can mend: one sentence on stderr and exit code 2."""

from __future__ import annotations

from data_pipeline.errors import DataError
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.safe_files import UnsafeFile
from megalite.config import ConfigError
from megalite.config.errors import one_line
from megalite.resilience.signals import INTERRUPTED_CODE as INTERRUPTED_CODE
from megalite.resilience.signals import PREEMPTED_CODE as PREEMPTED_CODE
from models.hub.config_parts import FamilyError


class LaunchError(ValueError):
    """Raised for a program that was started wrongly; each of its sentences says what is wrong, and what to do.

    Its text is one line, as that of a `ConfigError`.
    """

    def __init__(self, *sentences: str) -> None:
        super().__init__(one_line(sentences))
        self.sentences = sentences


def sentences_of(error: Exception) -> tuple[str, ...]:
    """Returns what to tell the user of one of `USER_ERRORS`: every problem, if it names several."""
    return error.sentences if isinstance(error, ConfigError | LaunchError) else (str(error),)


USER_ERRORS = (ConfigError, DataError, CheckpointError, FamilyError, LaunchError, UnsafeFile)
VERIFY_FAILED_CODE = 1
FAILED_CODE = 1  # a run that broke, or could not save its last state
USER_ERROR_CODE = 2
STOPPED_CODE = 3  # a guard ended the run
HUNG_CODE = 86  # the watchdog ended the run
