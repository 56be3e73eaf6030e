"""The place where the ranks of a run meet: torch's store, where each rank notes how far it has come.

torch waits there without a word until all ranks have come. Here each one leaves its number, so that rank 0 can say who
is missing, and proves that it belongs to this attempt if the attempt has a secret (rank_admission.py).

torchrun keeps one store while it restarts ranks (--max-restarts), and ranks that it has ended cannot take their notes
back. So rank 0 removes all notes when it comes, and ranks that still live renew theirs. torchrun's
TORCHELASTIC_RESTART_COUNT could not tell the notes apart: each host counts its own failures. torch's own keys stay, so
that a rank may find addresses of ended ones, and torchrun has to start all again (docs/coming_from.md).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch.distributed import DistError

from megalite.distributed.agreement import from_all_ranks
from megalite.distributed.errors import RendezvousFailed
from megalite.distributed.meeting_store import join, serve
from megalite.distributed.rank_admission import (
    FOLDER,
    SECRET,
    SharedSecret,
    is_loopback_address,
    is_private,
    is_served,
    use_loopback,
)
from megalite.distributed.start_failures import CHALLENGE, End, FailureWatch, StartFailure
from megalite.units import plural

log = logging.getLogger(__name__)

POLL_S = 0.2  # between two questions whether all ranks have come
RENEWAL_S = 0.2  # between two notes of a rank that has come
REFUSAL_S = 1.0  # that rank 0, which serves the store, stays for the others to read that a rank is refused
NAMED = 8  # missing ranks that are listed one by one
COME, JOINED = "come", "joined"
VERDICT = "megalite/verdict"  # key of rank 0
ALL_PROVEN, REFUSED = "all", "refused"


class Rendezvous:
    """The notes of all ranks, and the `store` with which torch's own rendezvous then takes place.

    The notes have a connection of their own, because torch keeps that of `store` busy while it waits for other ranks.
    `secret` is what all ranks have proven to know; None if the attempt has none.
    """

    store: Store
    _notes: Store

    def __init__(
        self,
        timeout: timedelta,
        announce: Callable[[Callable[[], str]], None] = lambda sentence: None,
        environment: MutableMapping[str, str] = os.environ,
        end: End | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Returns once this rank has come, and on rank 0 once all ranks have. Raises RendezvousFailed.

        Reads the variables that torch reads: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; and those of our own
        launchers: the folder where ranks of one host meet, and the secret of this attempt, which is removed from
        `environment`. `announce` takes a function that says at any later moment what this rank waits for. `end` is
        called in a thread when another rank has failed, until `close`; it is to end this process. Ranks have
        `patience_s` to come, by default the timeout, which is that of a request.
        """
        self.rank, self.world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._has_joined, self._announce, self._end = threading.Event(), announce, end
        self._watch: FailureWatch | None = None
        self._patience_s = timeout.total_seconds() if patience_s is None else patience_s
        self.secret: SharedSecret | None = None
        is_by_torchrun = is_served(environment)
        secret, folder = environment.pop(SECRET, ""), environment.get(FOLDER)
        address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        self._folder = folder
        self.place = f"in {folder}" if folder else f"at {address}:{port}"
        if self.world_size == 1 or folder or is_loopback_address(address):
            use_loopback(environment)
        try:
            if self.world_size == 1:
                self._notes = HashStore()
            elif folder:
                self._meet_in(Path(folder))
            else:
                self._meet_over_tcp(address, int(port), timeout, secret, is_by_torchrun=is_by_torchrun)
            # strangers that know no secret do not know where torch's keys are unless they list all of them
            name = "torch" if self.secret is None else self.secret.proof("process group")
            self.store = PrefixStore(name, self._notes)  # which torch keeps, and rank 0's server with it
            self.store.set_timeout(timeout)
            self._notes = self._watch.store if self._watch is not None else _clone(self._notes)
        except (DistError, OSError) as error:
            raise RendezvousFailed(self._reason(error)) from None

    def _meet_in(self, folder: Path) -> None:
        """Meets ranks of the same user on this host; to open the folder is proof enough."""
        if not is_private(folder):
            raise RendezvousFailed(
                f"{FOLDER} is {folder}, which is no folder that this user alone can open: set TMPDIR to a folder of a "
                "local file system with modes, or unset it where megalite does not start the ranks"
            )
        self._notes = FileStore(str(folder / "store"), self.world_size)
        self._come()

    def _meet_over_tcp(self, address: str, port: int, timeout: timedelta, secret: str, *, is_by_torchrun: bool) -> None:
        self._announce(lambda: f"rank {self.rank} of {self.world_size} waits for rank 0 {self.place}")
        if self.rank == 0 and not is_by_torchrun:
            self._notes = serve(address, port, timeout)
        else:
            self._notes = join(address, port, timeout, self._patience_s)
        if self._end is not None:
            self._watch = FailureWatch(_clone(self._notes), self.rank, self.world_size, secret, self._end)
        if not is_by_torchrun:
            return self._prove_and_come(secret)
        # the notes of a rendezvous before a restart
        self._notes.delete_key(_key(JOINED, self.rank))
        if self.rank == 0:
            for rank in range(self.world_size):
                self._notes.delete_key(_key(COME, rank))
        self._come()
        if self.rank:  # without torchrun the notes end with the process of rank 0
            threading.Thread(target=self._renew, name="rendezvous", daemon=True).start()

    def _come(self, proof: str = "") -> None:
        """Notes that this rank has come; rank 0 waits for all others."""
        if self.rank == 0:
            self._announce(self._waiting)
        self._notes.set(_key(COME, self.rank), proof)
        if self.rank == 0:
            self._wait_for_all()

    def _prove_and_come(self, secret: str) -> None:
        """Meets the other ranks, and if there is a secret, only those that know it. Reads and writes O(ranks) keys.

        A rank that finds another run at this place leaves without a note, so that the other run goes on.
        """
        if self.rank == 0:
            shared = SharedSecret(secret, self.world_size)
            self._notes.set(CHALLENGE, shared.challenge if secret else "")
            self._come()
            if secret:
                self._check_proofs(shared)
        else:
            challenge = self._notes.get(CHALLENGE).decode()
            shared = SharedSecret(secret, self.world_size, challenge)
            if bool(secret) != bool(challenge) or (secret and not shared.opens(challenge)):
                raise RendezvousFailed(
                    f"rank {self.rank} of {self.world_size} has found another run {self.place}, whose rank 0 does not "
                    "share this run's secret: set another MASTER_PORT, or start all ranks with one command"
                )
            self._come(shared.proof(f"rank {self.rank}") if secret else "")
            if secret:
                come = f"rank {self.rank} of {self.world_size} has reached rank 0 {self.place}, which waits for others"
                self._announce(lambda: come)
                verdict = self._notes.get(VERDICT).decode(errors="replace")
                if not shared.proves(ALL_PROVEN, verdict):
                    number = verdict.removeprefix(f"{REFUSED} ")
                    raise RendezvousFailed(self._refusal(int(number) if number.isdecimal() else 0))
        self.secret = shared if secret else None

    def _check_proofs(self, shared: SharedSecret) -> None:
        """Says on rank 0 whether all other ranks have proven that they know the secret."""
        others = range(1, self.world_size)
        proofs = self._notes.multi_get([_key(COME, rank) for rank in others])
        for rank, proof in zip(others, proofs, strict=True):
            if not shared.proves(f"rank {rank}", proof.decode(errors="replace")):
                self._notes.set(VERDICT, f"{REFUSED} {rank}")
                time.sleep(REFUSAL_S)
                raise RendezvousFailed(self._refusal(rank))
        self._notes.set(VERDICT, shared.proof(ALL_PROVEN))

    def check_members(self) -> None:
        """Checks that each member of the process group knows the attempt's secret; collective.

        Who can list the keys of the store finds torch's among them and can be in the group before a rank is. Raises
        RendezvousFailed, or MessageRefused for what is no proof at all.
        """
        if (secret := self.secret) is not None:
            for rank, proof in enumerate(from_all_ranks(secret.proof(f"member {self.rank}"), str)):
                if not secret.proves(f"member {rank}", proof):
                    raise RendezvousFailed(self._refusal(rank))

    def _refusal(self, rank: int) -> str:
        return (
            f"rank {rank} does not know this run's secret: another program or another run has joined {self.place}: "
            "start this run again, with another MASTER_PORT if you have set it"
        )

    def note(self, milestone: str) -> None:
        """Notes that this rank has come to `milestone`."""
        self._notes.set(_key(milestone, self.rank), "")
        if milestone == JOINED:
            self._has_joined.set()

    def note_failure(self, host: str, code: int, text: str) -> bool:
        """Tells the other ranks why this one ends; returns whether they hear of it."""
        return self._watch is not None and self._watch.note(StartFailure(self.rank, host, code, text))

    def close(self) -> None:
        """Stops looking for failures of other ranks, because the run has started."""
        if self._watch is not None:
            self._watch.close()

    def _renew(self) -> None:
        """Notes again and again that this rank has come, as rank 0 may come after it, until all ranks have joined."""
        with suppress(DistError):  # the store has ended, which the main thread notices by itself
            while not self._has_joined.wait(RENEWAL_S):
                self._notes.set(_key(COME, self.rank), "")

    def first_collective(self) -> str:
        """Says whom rank 0 waits for when all ranks have come and it communicates with them for the first time."""
        absent = self._missing(JOINED)
        if not absent:
            return f"all {self.world_size} ranks are connected and begin to communicate"
        return f"rank 0 of {self.world_size} waits in the first collective for {self._listed(absent)}"

    def _missing(self, milestone: str) -> list[int]:
        """Returns the other ranks that have not come to `milestone`."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return [rank for rank in others if not self._notes.check([_key(milestone, rank)])]

    def _listed(self, ranks: Sequence[int]) -> str:
        """Returns "2 others (ranks 3, 5)"; of many, the first few, and no numbers where all others are meant."""
        count = plural(len(ranks), "other")
        if len(ranks) == self.world_size - 1:
            return count
        more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
        return f"{count} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:NAMED]))}{more})"

    def _waiting(self) -> str:
        absent = self._listed(self._missing(COME))
        return f"rank 0 of {self.world_size} waits for {absent} {self.place}"

    def _wait_for_all(self) -> None:
        notes = [_key(COME, rank) for rank in range(self.world_size)]
        deadline, pause = time.monotonic() + self._patience_s, 0.002
        while not self._notes.check(notes):
            if time.monotonic() > deadline:
                raise RendezvousFailed(
                    f"rank 0 of {self.world_size} waited {self._patience_s / 60:g} minutes {self.place} for "
                    f"{self._listed(self._missing(COME))}: look at why they did not start"
                )
            time.sleep(pause)
            pause = min(POLL_S, 1.5 * pause)

    def _reason(self, error: DistError | OSError) -> str:
        text = str(error)
        place = self.place.removeprefix("at ")
        if "EADDRINUSE" in text or "Address already in use" in text:
            return f"{place}, where the ranks are to meet, is used by another program: set another MASTER_PORT"
        if self._folder:
            return f"ranks cannot meet {self.place}: {text.splitlines()[0]}: set TMPDIR to a folder of a local disk"
        return f"rank {self.rank} of {self.world_size} cannot reach rank 0 {self.place}: {text.splitlines()[0]}"


def _clone(store: Store) -> Store:
    """Returns a connection of its own to the same store."""
    return store.clone()  # type: ignore[attr-defined]  # not in torch's stubs


def _key(milestone: str, rank: int) -> str:
    return f"megalite/{milestone}/{rank}"
