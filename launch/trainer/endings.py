"""Endings of a rank: its exit code, and who is told why."""

from __future__ import annotations

import logging
import os

from launch.errors import (
    FAILED_CODE,
    INTERRUPTED_CODE,
    PREEMPTED_CODE,
    STOPPED_CODE,
    USER_ERROR_CODE,
    USER_ERRORS,
    sentences_of,
)
from launch.runtime.logs import get_logger
from launch.runtime.rank_environment import Rank
from launch.runtime.rank_process import log_once
from launch.runtime.start_witness import witness
from launch.trainer.start.joining import leave_together, lost_rank
from launch.trainer.start.run_folder import RunFolderInUse
from megalite.checkpoint.durable_files import NO_ROOM
from megalite.checkpoint.errors import StorageError
from megalite.distributed.errors import MessageRefused, RendezvousFailed
from megalite.distributed.rank_admission import ATTEMPT
from megalite.training.state import SaveFailed, TrainingInterrupted, TrainingPreempted, TrainingStopped

log = get_logger(__name__)
ENDINGS: dict[type[Exception], tuple[int, str]] = {
    TrainingStopped: (STOPPED_CODE, "stopped"),
    TrainingPreempted: (PREEMPTED_CODE, "preempted"),
    TrainingInterrupted: (INTERRUPTED_CODE, "interrupted"),
    SaveFailed: (FAILED_CODE, "not saved"),
}


def report_ending(error: Exception, rank: Rank | None) -> int | None:
    """Tells the user and the other ranks why a rank ends; returns its exit code, or None for an unexpected error."""
    if isinstance(error, USER_ERRORS):
        may_pass = isinstance(error, StorageError) and not error.is_lasting
        may_pass |= isinstance(error, RunFolderInUse) and ATTEMPT in os.environ  # by a frozen host of an attempt before
        code = FAILED_CODE if may_pass else USER_ERROR_CODE
        return _fail("\nmegalite: error: ".join(sentences_of(error)), rank, code)
    if isinstance(error, (TrainingStopped, TrainingPreempted, SaveFailed)):
        code, ending = ENDINGS[type(error)]
        if rank is not None and rank.rank == 0:
            was_asked = isinstance(error, TrainingPreempted)
            log.log(logging.WARNING if was_asked else logging.ERROR, f"{ending}: {error}")
        leave_together()
        return code
    if isinstance(error, (MessageRefused, RendezvousFailed)):
        return _fail(str(error), rank)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = error.filename or "a disk that the run writes to"
        return _fail(f"{where}: {NO_ROOM[error.errno]}: free some space", rank)
    if (lost := lost_rank(error)) and rank is not None:
        # the lost one tells the others itself, or its witness does
        log_once(f"rank {rank.rank} lost another rank while the run started ({lost}): look at what that one said", rank)
        return FAILED_CODE
    witness.fail(FAILED_CODE, f"{type(error).__name__}: {error}")
    return None


def _fail(sentence: str, rank: Rank | None, code: int = FAILED_CODE) -> int:
    """Tells the ranks of other hosts, and the user, why this rank fails; returns its exit code."""
    if is_first := rank is None or rank.local_rank == 0:
        log_once(sentence, rank)  # at once: until the others have heard takes seconds
    witness.fail(code, sentence)
    if not is_first:
        log_once(sentence, rank)
    return code
