"""Copies of data at URLs, made by the first rank of each host while all ranks of a run wait."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from data_pipeline.errors import DataError
from launch.runtime.rank_environment import Rank
from launch.runtime.startup_progress import StartupProgress
from launch.trainer.data.remote_data import TELL_EVERY_S, HostFetch, RemoteCorpus, Work, look_up, places_of, with_copies
from megalite.checkpoint.errors import StorageError
from megalite.config import Config

LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class HostState:
    """Progress of the copies of one host."""

    is_done: bool = True
    problem: str = field(default="")  # a sentence; empty: none
    may_pass: bool = False  # the problem, by another try


def copy_to_all_hosts(config: Config, rank: Rank, progress: StartupProgress) -> Config:
    """Makes every host copy the data at URLs; returns the config with the copies in their place. Collective.

    Ranks wait in many short collectives, so that none outlasts its timeout however long another host takes. Raises
    DataError or StorageError on all ranks if one host fails.
    """
    if not config.data.urls:
        return config
    from megalite.distributed.agreement import from_all_ranks, from_rank_0

    progress.begin("looking for the data")
    corpora = from_rank_0(lambda: look_up(config.data.urls), list[RemoteCorpus], (DataError, StorageError))
    thread = None
    if rank.local_rank == 0:
        fetch = HostFetch(config.data, config.training.sequence_length, corpora)
        thread = Work(fetch.run)
        progress.begin_waiting(fetch.sentence, TELL_EVERY_S, on_each_host=True)
        thread.start()
    while True:
        own = _state(thread)
        states = from_all_ranks(own, HostState)
        if failed := [state for state in states if state.problem]:
            raise StorageError(failed[0].problem) if failed[0].may_pass else DataError(failed[0].problem)
        if all(state.is_done for state in states):
            break
        if thread is not None and own.is_done:  # one that has ended since is told of in the next round
            progress.begin_waiting(lambda: "waiting for other hosts to copy the data", TELL_EVERY_S)
            thread = None
        time.sleep(LOOK_AGAIN_S)
    return config.model_copy(update={"data": with_copies(config.data, places_of(config.data, corpora))})


def _state(thread: Work[None] | None) -> HostState:
    if thread is None:
        return HostState()
    if thread.is_alive():
        return HostState(is_done=False)
    if thread.problem is None:
        return HostState()
    known = isinstance(thread.problem, DataError | StorageError)
    problem = " ".join(f"{'' if known else f'{type(thread.problem).__name__}: '}{thread.problem}".split())
    return HostState(problem=problem, may_pass=isinstance(thread.problem, StorageError))
