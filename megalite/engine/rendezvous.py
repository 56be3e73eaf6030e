"""The place where the ranks of a run meet: torch's store on rank 0's host, where each rank notes how far it has come.

torch waits there without a word until all ranks have come. Here each one leaves its number, so that rank 0 can say who
is missing. torchrun keeps one store while it restarts ranks (--max-restarts), and ranks that it has ended cannot take
their notes back. So rank 0 removes all notes when it comes, and ranks that still live renew theirs. torchrun's
TORCHELASTIC_RESTART_COUNT could not tell the notes apart: each host counts its own failures.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from megalite.engine.errors import RendezvousFailed
from megalite.planner.units import plural

POLL_S = 0.2  # between two questions whether all ranks have come
RENEWAL_S = 0.2  # between two notes of a rank that has come
NAMED = 8  # missing ranks that are listed one by one
COME, JOINED = "come", "joined"


class Rendezvous:
    """The notes of all ranks; torch's own rendezvous then takes place on the same server."""

    def __init__(self, timeout: timedelta, announce: Callable[[Callable[[], str]], None]) -> None:
        """Returns once this rank has come, and on rank 0 once all ranks have. Raises RendezvousFailed.

        Reads the variables that torch reads: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. `announce` takes a function
        that says at any later moment what this rank waits for.
        """
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.place = f"{address}:{port}"
        # torchrun's own process serves the store to its ranks, as torch/distributed/rendezvous.py reads it
        is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._has_joined = threading.Event()
        announce(lambda: f"rank {self.rank} of {self.world_size} waits for rank 0 at {self.place}")
        try:
            self._store = TCPStore(
                address,
                port,
                is_master=self.rank == 0 and not is_served,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=not is_served,
            )
            if self.rank == 0:
                announce(self._waiting)
            self._store.delete_key(_key(JOINED, self.rank))  # from before a restart
            if self.rank == 0 and is_served:
                for rank in range(self.world_size):  # left by a rendezvous before
                    self._store.delete_key(_key(COME, rank))
            self.note(COME)
            if self.rank == 0:
                self._wait_for_all(timeout)
            elif is_served:  # else the notes end with the process of rank 0
                threading.Thread(target=self._renew, name="rendezvous", daemon=True).start()
        except DistError as error:
            raise RendezvousFailed(self._reason(error)) from None

    def note(self, milestone: str) -> None:
        """Notes that this rank has come to `milestone`."""
        self._store.set(_key(milestone, self.rank), "")
        if milestone == JOINED:
            self._has_joined.set()

    def _renew(self) -> None:
        """Notes again and again that this rank has come, as rank 0 may come after it, until all ranks have joined."""
        with suppress(DistError):  # the store has ended, which the main thread notices by itself
            while not self._has_joined.wait(RENEWAL_S):
                self._store.set(_key(COME, self.rank), "")

    def first_collective(self) -> str:
        """Says whom rank 0 waits for when all ranks have come and it communicates with them for the first time."""
        absent = self._missing(JOINED)
        if not absent:
            return f"all {self.world_size} ranks are connected and begin to communicate"
        return f"rank 0 of {self.world_size} waits in the first collective for {self._listed(absent)}"

    def _missing(self, milestone: str) -> list[int]:
        """Returns the other ranks that have not come to `milestone`."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return [rank for rank in others if not self._store.check([_key(milestone, rank)])]

    def _listed(self, ranks: Sequence[int]) -> str:
        """Returns "2 others (ranks 3, 5)"; of many, the first few, and no numbers where all others are meant."""
        count = plural(len(ranks), "other")
        if len(ranks) == self.world_size - 1:
            return count
        more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
        return f"{count} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:NAMED]))}{more})"

    def _waiting(self) -> str:
        absent = self._listed(self._missing(COME))
        return f"rank 0 of {self.world_size} waits for {absent} at {self.place}"

    def _wait_for_all(self, timeout: timedelta) -> None:
        notes = [_key(COME, rank) for rank in range(self.world_size)]
        deadline, pause = time.monotonic() + timeout.total_seconds(), 0.002
        while not self._store.check(notes):
            if time.monotonic() > deadline:
                raise RendezvousFailed(
                    f"rank 0 of {self.world_size} waited {timeout.total_seconds() / 60:g} minutes at {self.place} for "
                    f"{self._listed(self._missing(COME))}: look at why they did not start"
                )
            time.sleep(pause)
            pause = min(POLL_S, 1.5 * pause)

    def _reason(self, error: DistError) -> str:
        text = str(error)
        if "EADDRINUSE" in text:
            return f"{self.place}, where the ranks are to meet, is used by another program: set another MASTER_PORT"
        return f"rank {self.rank} of {self.world_size} cannot reach rank 0 at {self.place}: {text.splitlines()[0]}"


def _key(milestone: str, rank: int) -> str:
    return f"megalite/{milestone}/{rank}"
