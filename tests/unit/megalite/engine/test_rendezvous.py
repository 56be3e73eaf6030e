"""Who is missing where the ranks of a run meet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from launch.runtime.local_ranks import free_port
from megalite.engine.errors import RendezvousFailed
from megalite.engine.rendezvous import JOINED, Rendezvous

LIMIT = timedelta(seconds=1.2)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process is rank 0 of 4."""
    port = free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return port


def test_the_missing_ranks_are_named(port: int) -> None:
    """Rank 2 comes, the others do not; the same sentence is told while rank 0 still waits."""
    sentences: list[Callable[[], str]] = []

    def rank_2_comes() -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT, wait_for_workers=False)
        store.set("megalite/come/2", "")

    other = threading.Thread(target=rank_2_comes)
    other.start()
    with pytest.raises(RendezvousFailed) as failed:
        Rendezvous(LIMIT, sentences.append)
    other.join()
    who = f"at 127.0.0.1:{port} for 2 others (ranks 1, 3)"
    assert str(failed.value) == f"rank 0 of 4 waited 0.02 minutes {who}: look at why they did not start"
    assert sentences[-1]() == f"rank 0 of 4 waits for 2 others (ranks 1, 3) at 127.0.0.1:{port}"


@pytest.fixture
def kept_store(port: int, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of torchrun's own process, which outlives the ranks; a failure on another host is not counted."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return store


def come(rank: int, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    monkeypatch.setenv("RANK", str(rank))
    return Rendezvous(LIMIT, lambda sentence: None)


def test_after_a_restart_by_torchrun_the_ranks_of_before_are_missing(
    kept_store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in [come(rank, monkeypatch) for rank in (1, 2, 3, 0)]:
        one.note(JOINED)
    with pytest.raises(RendezvousFailed, match="for 3 others: look at why they did not start"):
        come(0, monkeypatch)
    again = [come(rank, monkeypatch) for rank in (1, 2, 3, 0)]
    assert "waits in the first collective for 3 others" in again[-1].first_collective()
    for one in again:
        one.note(JOINED)


def test_ranks_that_torchrun_ended_while_rank_0_waited_are_missing_after_the_restart(
    kept_store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 1 and 2 had come when they and rank 0 were ended; then ranks 3 and 0 come, in this order."""
    for rank in (1, 2):
        kept_store.set(f"megalite/come/{rank}", "")
    living = come(3, monkeypatch)
    with pytest.raises(RendezvousFailed, match=r"for 2 others \(ranks 1, 2\): look at why they did not start"):
        come(0, monkeypatch)
    living.note(JOINED)


def test_a_port_that_is_taken_is_a_sentence(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(RendezvousFailed, match=f"127.0.0.1:{port}, .* is used by another program"):
            Rendezvous(LIMIT, lambda sentence: None)
