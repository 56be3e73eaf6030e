"""Joins a rank to the others of its run: it meets them, or ends with the one that has failed, and leaves with them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from launch.errors import HUNG_CODE, LaunchError
from launch.runtime.devices import Device, chosen_device
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.runtime.rank_environment import Rank, waiting_hint
from launch.runtime.start_witness import will_be_restarted, witness
from launch.runtime.startup_progress import StartupProgress
from megalite.config import Config
from megalite.distributed.errors import RendezvousFailed
from megalite.distributed.rank_admission import ATTEMPT, is_loopback_address

if TYPE_CHECKING:
    from megalite.distributed.start_failures import StartFailure

log = get_logger(__name__)
WAITING_AGAIN_S = 60.0  # between two sentences about the same wait for other ranks
COLLECTIVE_TIMEOUT_FRACTION = 5 / 6  # of the process group's timeout, within which rank 0 must join the others
LOCAL_PATIENCE_S = 60.0  # in which ranks of one host come that only variables, perhaps left over, have made ranks


def join_ranks(config: Config, rank: Rank, progress: StartupProgress) -> Device:
    """Waits for all ranks and joins the process group; returns the kind of this rank's device. Collective."""
    chosen_device()  # before DeepSpeed is imported, which fails in its own words where it lacks the device's packages
    from megalite.distributed.rendezvous import JOINED, Rendezvous
    from megalite.engine.deepspeed.process_groups import start_distributed

    timeout = timedelta(minutes=config.watchdog.timeout_minutes)
    hint = waiting_hint(rank)

    def announce(sentence: Callable[[], str]) -> None:
        progress.begin_waiting(lambda: sentence() + hint, WAITING_AGAIN_S, on_each_host=True)

    rendezvous, may_be_left_over = None, not rank.launcher and rank.world_size > 1 and ATTEMPT not in os.environ
    if may_be_left_over:
        log.info(f"rank {rank.rank} of {rank.world_size} meets the others at {os.environ.get('MASTER_ADDR')}{hint}")
    if rank.world_size > 1:
        is_here = may_be_left_over and is_loopback_address(os.environ["MASTER_ADDR"])
        patience_s = min(LOCAL_PATIENCE_S, timeout.total_seconds()) if is_here else None
        try:
            rendezvous = Rendezvous(timeout, announce, end=partial(_end_with, rank=rank), patience_s=patience_s)
        except RendezvousFailed as error:
            if not is_here:
                raise
            witness.end()  # there is nobody to tell
            raise LaunchError(f"{error}{hint}") from None
        progress.at_first_step += [rendezvous.close, witness.end]
        if not will_be_restarted(os.environ):
            witness.note = partial(rendezvous.note_failure, socket.gethostname())
    progress.begin("connecting all ranks" if rendezvous is not None else "preparing the device")
    kind = start_distributed(rank.local_rank, timeout, rendezvous).type
    if rendezvous is not None:
        rendezvous.note(JOINED)
        progress.begin_waiting(rendezvous.first_collective, WAITING_AGAIN_S)
        rendezvous.check_members()
    return "cuda" if kind == "cuda" else "cpu"


def _end_with(failure: StartFailure, is_heard: Callable[[], bool], rank: Rank) -> None:
    """Ends this process, from any thread, because another rank has failed; not where it has failed itself, says so, and
    ends."""
    if witness.has_told:
        return
    if rank.local_rank == 0:
        say(f"megalite: error: rank {failure.rank} on {failure.host}: {failure.text}", file=sys.stderr, flush=True)
    if rank.rank == 0 and not is_heard():  # its witness serves those that come later
        witness.fail(failure.code, failure.text, of=(failure.rank, failure.host))
    witness.end()
    os._exit(failure.code)


def lost_rank(error: Exception) -> str:
    """Returns torch's message if `error` comes from a rank that is gone, as while groups are built, else ""."""
    if "torch" not in sys.modules:
        return ""
    from megalite.resilience.watchdog import lost_connection

    return lost_connection(error)


def longest_wait_s() -> float:
    """Returns how long the other ranks may wait for this one in a barrier, in seconds."""
    from megalite.engine.deepspeed.process_groups import group_timeout

    return COLLECTIVE_TIMEOUT_FRACTION * group_timeout().total_seconds()


def leave_together() -> None:
    """Leaves the process group with all ranks, or ends the process if that takes longer than a collective may."""
    from megalite.engine.deepspeed.process_groups import stop_distributed
    from megalite.resilience.watchdog import leave_within

    with leave_within(longest_wait_s() + 60, HUNG_CODE):
        stop_distributed()
