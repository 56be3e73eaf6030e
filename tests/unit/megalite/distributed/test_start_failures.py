"""A failure of one rank is heard by all others, whoever serves the store; nobody else can make one up."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import cast

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from launch.runtime.local_ranks import free_port
from megalite.distributed import start_failures
from megalite.distributed.meeting_store import join, serve
from megalite.distributed.rank_admission import SECRET, SharedSecret, new_secret
from megalite.distributed.rendezvous import Rendezvous
from megalite.distributed.start_failures import FAILED, FailureWatch, StartFailure, note_failure, read_failure

LIMIT = timedelta(seconds=20)
FAILURE = StartFailure(0, "node1", 2, "run_dir is full")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "RETRY_S"):
        monkeypatch.setattr(start_failures, name, 0.02)


def environment(rank: int, port: int, secret: str) -> dict[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return own | ({SECRET: secret} if secret else {})


@pytest.mark.parametrize("secret", ["", new_secret()], ids=["open", "with a secret"])  # each worker draws its own
@pytest.mark.parametrize("has_met", [False, True], ids=["before", "after they met"])
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_all_other_ranks_hear_of_a_failure(failed: int, has_met: bool, secret: str) -> None:
    """Rank 0 has failed before it served the store, or another rank while rank 0 waits for it; or one that has met the
    others tells them by itself, which takes no other process."""
    port, failure = free_port(), FAILURE._replace(rank=failed)
    heard: list[Future[StartFailure]] = [Future() for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:

        def come(rank: int) -> FailureWatch:
            def end(failure: StartFailure, is_heard: Callable[[], bool]) -> None:
                if rank == 0:
                    assert is_heard()
                heard[rank].set_result(failure)

            if rank == 0:
                store = serve("127.0.0.1", port, LIMIT)
                store.set("megalite/challenge", SharedSecret(secret, 3).challenge if secret else "")
            else:
                store = join("127.0.0.1", port, LIMIT, 20.0)
            kept.append(store)
            return FailureWatch(store.clone(), rank, 3, secret, end)  # type: ignore[attr-defined]

        kept: list[object] = []
        comers = {rank: threads.submit(come, rank) for rank in range(3) if has_met or rank != failed}
        if has_met:
            assert comers[failed].result().note(failure)
        else:
            note_failure(failure, environment(failed, port, secret), 20.0)
        for comer in comers.values():
            comer.result()
        assert [heard[rank].result(20) for rank in range(3) if rank != failed] == [failure] * 2


class EndedStore:
    """A store that tells of a failure and ends then, as with the process of rank 0; `check` answers `answers` times."""

    def __init__(self, answers: int) -> None:
        self._answers = answers

    def check(self, keys: list[str]) -> bool:
        self._answers -= 1
        if self._answers < 0:
            raise DistError("the store has ended")
        return True

    def get(self, key: str) -> bytes:
        return FAILURE.packed(None).encode()

    def set(self, key: str, value: str) -> None:
        raise DistError("the store has ended")


@pytest.mark.parametrize("answers", [1, 2])
def test_a_failure_that_was_read_ends_the_rank_though_the_store_ends_then(answers: int) -> None:
    """The rank waited for the others until its time was up, with the reason in its hand."""
    ended: Future[tuple[StartFailure, bool]] = Future()
    FailureWatch(
        cast(Store, EndedStore(answers)), 1, 3, "", lambda failure, heard: ended.set_result((failure, heard()))
    )
    assert ended.result(5) == (FAILURE, answers == 2)


def test_notes_that_no_rank_of_the_run_has_written_are_ignored() -> None:
    """A stranger, or another run at the same place, could end the run otherwise."""
    port, secret = free_port(), new_secret()
    store = serve("127.0.0.1", port, LIMIT)
    own = SharedSecret(secret, 3)
    store.set("megalite/challenge", own.challenge)
    other = SharedSecret(new_secret(), 3, own.challenge)
    fields = FAILURE._asdict()
    hostile = [
        b"\xff", b"[]", b"null", b"{" * 10_000, FAILURE.packed(None).encode(), FAILURE.packed(other).encode(),
        json.dumps(fields).encode(), json.dumps(fields | {"rank": 3, "proof": ""}).encode(),
    ]  # fmt: skip
    for note in hostile:
        store.set(FAILED, note)
        assert read_failure(store, secret, 3) is None, note
    for wrong in ({"code": 0}, {"code": 256}, {"rank": True}, {"rank": -1}, {"text": 1}, {"more": 1}):
        assert StartFailure.unpacked(json.dumps(fields | {"proof": ""} | wrong).encode(), None, 3) is None, wrong
    note_failure(FAILURE._replace(rank=1), environment(1, port, new_secret()), 0.1)
    assert read_failure(store, secret, 3) is None
    note_failure(FAILURE._replace(rank=1), environment(1, port, secret), 20.0)
    assert read_failure(store, secret, 3) == FAILURE._replace(rank=1)


def test_a_rank_that_waits_in_torch_is_ended_too() -> None:
    """Rank 1 meets a store that a witness of rank 0 serves, and would wait for the others there."""
    port, secret = free_port(), new_secret()
    ended: Future[StartFailure] = Future()
    with ThreadPoolExecutor(2) as threads:
        threads.submit(note_failure, FAILURE, environment(0, port, secret), 1.0)
        own = environment(1, port, secret)
        threads.submit(
            Rendezvous, timedelta(seconds=1), environment=own, end=lambda failure, _: ended.set_result(failure)
        )
        assert ended.result(20) == FAILURE


def test_a_rank_does_not_wait_for_a_store_whose_host_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's client would, for ever; its witness, or the launcher, is left to tell the others."""
    monkeypatch.setattr(start_failures, "ANSWER_S", 0.3)
    store, is_frozen = serve("127.0.0.1", free_port(), LIMIT), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pass_on(source: socket.socket, to: socket.socket) -> None:
            while data := source.recv(1 << 16):
                if not is_frozen.is_set():
                    to.sendall(data)

        def accept() -> None:
            with suppress(OSError):  # closed
                while True:
                    near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", store.port))
                    for ends in ((near, far), (far, near)):
                        threading.Thread(target=pass_on, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        watch = FailureWatch(join("127.0.0.1", listener.getsockname()[1], LIMIT, 20.0), 1, 2, "", lambda *_: None)
        is_frozen.set()
        began = time.monotonic()
        assert not watch.note(FAILURE._replace(rank=1)) and time.monotonic() - began < 10
