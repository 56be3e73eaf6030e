"""A rank that fails before a run has started ends the ranks of all hosts, with its own message.

Launchers of several hosts notice late or never that one of them has failed while the others wait for it. So the failure
becomes a note in the store at which the ranks meet, where each rank looks once a second. The store ends with the
process of rank 0, so nothing is left of it for a later attempt, and no clock or shared folder is needed. Where ranks
have a secret, only a note that proves to know it counts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from megalite.distributed.meeting_store import answered_within, join, serve
from megalite.distributed.rank_admission import SECRET, SharedSecret, is_served

FAILED, HEARD, CHALLENGE = "megalite/failed", "megalite/heard", "megalite/challenge"  # keys of the store
LOOK_S = 1.0  # between two looks at the store
RETRY_S = 0.5
ANSWER_S = 10.0  # for a store that is there to answer
LONGEST_BYTES = 1 << 14
LONGEST_TEXT = 4000


class StartFailure(NamedTuple):
    """The reason why a rank has ended."""

    rank: int
    host: str
    code: int  # its exit code
    text: str

    def packed(self, shared: SharedSecret | None) -> str:
        """Returns the note of this failure."""
        cut = self._replace(text=self.text[:LONGEST_TEXT])
        return json.dumps({**cut._asdict(), "proof": shared.proof(cut._claim()) if shared is not None else ""})

    @classmethod
    def unpacked(cls, data: bytes, shared: SharedSecret | None, world_size: int) -> StartFailure | None:
        """Returns the failure in a note; None if no rank of this run has written it."""
        try:
            if len(data) > LONGEST_BYTES:
                return None
            fields = json.loads(data)
            proof = fields.pop("proof")
            found = cls(**fields)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None
        texts, numbers = (found.host, found.text, proof), (found.rank, found.code)
        is_sound = all(type(one) is str for one in texts) and all(type(one) is int for one in numbers)
        if not is_sound or not (0 <= found.rank < world_size and 0 < found.code < 256):
            return None
        return found if shared is None or shared.proves(found._claim(), proof) else None

    def _claim(self) -> str:
        return json.dumps(["failed", *self])


def read_failure(store: Store, secret: str, world_size: int) -> StartFailure | None:
    """Returns the failure that a rank has noted in `store`; None if there is none. Raises DistError."""
    if not store.check([FAILED, *([CHALLENGE] if secret else [])]):
        return None
    shared = SharedSecret(secret, world_size, store.get(CHALLENGE).decode(errors="replace")) if secret else None
    return StartFailure.unpacked(store.get(FAILED), shared, world_size)


End = Callable[[StartFailure, Callable[[], bool]], None]


class FailureWatch:
    """Looks in `store` for the failure of another rank, in a thread, until it is closed."""

    def __init__(self, store: Store, rank: int, world_size: int, secret: str, end: End) -> None:
        """`end` is to end this process; it is called in the thread, with the failure and a function for rank 0, whose
        process serves the store: it returns whether all others have heard, which it waits for a while."""
        self.store, self._rank, self._world_size, self._secret, self._end = store, rank, world_size, secret, end
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="failures of the start", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    def note(self, failure: StartFailure) -> bool:
        """Notes this rank's own failure; returns whether the others have heard it, or can without this process."""
        with suppress(DistError, TimeoutError):
            answered_within(ANSWER_S, partial(self._leave, failure))
            return self._rank != 0 or _is_heard(self.store, self._world_size, time.monotonic() + ANSWER_S)
        return False

    def _leave(self, failure: StartFailure) -> None:
        if read_failure(self.store, self._secret, self._world_size) is None:
            challenge = self.store.get(CHALLENGE).decode() if self._secret else ""
            shared = SharedSecret(self._secret, self._world_size, challenge) if self._secret else None
            self.store.set(FAILED, failure.packed(shared))
        self.store.set(_heard(self._rank), "")

    def _look(self) -> None:
        failure = None
        with suppress(DistError):  # the store has ended, which the main thread notices by itself
            while failure is None and not self._is_over.wait(LOOK_S):
                failure = read_failure(self.store, self._secret, self._world_size)
        if failure is not None and failure.rank != self._rank:
            with suppress(DistError):  # what was read counts though the store has ended since
                self.store.set(_heard(self._rank), "")
            self._end(failure, partial(_is_heard, self.store, self._world_size, time.monotonic() + ANSWER_S))


def note_failure(failure: StartFailure, environment: Mapping[str, str], patience_s: float) -> None:
    """Notes a failure where ranks meet, from a process beside the rank that `environment` describes.

    Beside rank 0 it serves the store where rank 0 does no longer, until all other ranks have heard it. Gives up after
    `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(DistError, OSError):
            if _has_noted(failure, environment, deadline):
                return
        time.sleep(RETRY_S)


def _has_noted(failure: StartFailure, environment: Mapping[str, str], deadline: float) -> bool:
    """Returns whether the ranks can hear of the failure; False where another run is at their place, or, beside rank 0,
    where they have not heard."""
    rank, world_size, secret = int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment.get(SECRET, "")
    store, is_own = _store_of(environment, is_server=rank == 0)
    shared = SharedSecret(secret, world_size) if secret else None
    if is_own:
        store.set(CHALLENGE, shared.challenge if shared is not None else "")
    elif not is_served(environment):
        challenge = store.get(CHALLENGE).decode(errors="replace")
        shared = SharedSecret(secret, world_size, challenge) if secret else None
        if bool(secret) != bool(challenge) or (shared is not None and not shared.opens(challenge)):
            return False
    if read_failure(store, secret, world_size) is None:
        store.set(FAILED, failure.packed(shared))
    store.set(_heard(rank), "")
    return rank != 0 or _is_heard(store, world_size, deadline)


def _is_heard(store: Store, world_size: int, deadline: float) -> bool:
    """Waits until all ranks have heard of a failure; False if they have not by the `deadline`, or the store ends."""
    heard = [_heard(rank) for rank in range(world_size)]
    with suppress(DistError):
        while not store.check(heard):
            if time.monotonic() > deadline:
                return False
            time.sleep(RETRY_S)
        return True
    return False


def _store_of(environment: Mapping[str, str], *, is_server: bool) -> tuple[TCPStore, bool]:
    """Returns the store where ranks meet, and whether this process serves it. Raises DistError or OSError."""
    address, port, wait = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timedelta(seconds=ANSWER_S)
    try:
        return join(address, port, wait, 0.0), False
    except OSError:
        if not is_server:
            raise
        return serve(address, port, wait), True


def _heard(rank: int) -> str:
    return f"{HEARD}/{rank}"
