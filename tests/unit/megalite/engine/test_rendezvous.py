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

    def come() -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT, wait_for_workers=False)
        store.set("megalite/come/2", "")

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(RendezvousFailed) as failed:
        Rendezvous(LIMIT, sentences.append)
    other.join()
    who = f"at 127.0.0.1:{port} for 2 others (ranks 1, 3)"
    assert str(failed.value) == f"rank 0 of 4 waited 0.02 minutes {who}: look at why they did not start"
    assert sentences[-1]() == f"rank 0 of 4 waits for 2 others (ranks 1, 3) at 127.0.0.1:{port}"


def test_after_a_restart_by_torchrun_the_ranks_of_before_are_missing(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's own process serves the store, which outlives the ranks; a failure on another host is not counted."""
    _store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")

    def all_come() -> Rendezvous:
        for rank in ("1", "2", "3", "0"):
            monkeypatch.setenv("RANK", rank)
            rendezvous = Rendezvous(LIMIT, lambda sentence: None)
        return rendezvous

    first = all_come()
    for rank in range(4):
        first.rank = rank
        first.note(JOINED)
    with pytest.raises(RendezvousFailed, match="for 3 others: look at why they did not start"):
        Rendezvous(LIMIT, lambda sentence: None)
    assert "waits in the first collective for 3 others" in all_come().first_collective()


def test_a_port_that_is_taken_is_a_sentence(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(RendezvousFailed, match=f"127.0.0.1:{port}, .* is used by another program"):
            Rendezvous(LIMIT, lambda sentence: None)
