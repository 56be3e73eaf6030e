"""Who is missing where the ranks of a run meet, and who must not come."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from launch.runtime.local_ranks import free_port
from megalite.distributed import meeting_store, rendezvous
from megalite.distributed.errors import RendezvousFailed
from megalite.distributed.rank_admission import FOLDER, SECRET, new_secret
from megalite.distributed.rendezvous import JOINED, Rendezvous

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


def test_a_rank_that_torch_lets_wait_still_tells_rank_0_that_it_has_come(
    kept_store: TCPStore, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """Rank 0 comes last and removes the others' notes, while torch waits for it in a store that takes one call."""
    others = [come(rank, monkeypatch) for rank in (1, 2, 3)]
    waiting = [threads.submit(one.store.get, "rank 0") for one in others]
    first = come(0, monkeypatch)
    first.store.set("rank 0", "here")
    for one, answer in zip(others, waiting, strict=True):
        assert answer.result() == b"here"
        one.note(JOINED)


def test_a_port_that_is_taken_is_a_sentence(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(RendezvousFailed, match=f"127.0.0.1:{port}, .* is used by another program"):
            Rendezvous(LIMIT, lambda sentence: None)


def meet(rank: int, port: int, secret: str = "", world_size: int = 3, **more: str) -> Rendezvous:
    """Comes as a rank with an environment of its own."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own |= {SECRET: secret} if secret else {}
    met = Rendezvous(timedelta(seconds=20), environment=(own := own | more))
    assert SECRET not in own, "what a rank starts must not have it"
    return met


def listening(port: int | None = None) -> set[Any]:
    """Addresses at which this process listens on `port`; without one, addresses and ports."""
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return {tuple(one) for one in found} if port is None else {one.ip for one in found if one.port == port}


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(3)


def sentence_of(failed: Future[Rendezvous]) -> str:
    with pytest.raises(RendezvousFailed) as error:
        failed.result(timeout=10)
    return str(error.value)


def test_ranks_with_one_secret_meet_where_no_stranger_finds_them(port: int, threads: ThreadPoolExecutor) -> None:
    """The store itself is open: a stranger that takes rank 1's place as torch does writes where nobody reads."""
    secret = new_secret()
    comes = [threads.submit(meet, rank, port, secret) for rank in (1, 2)]
    first = meet(0, port, secret)
    others = [each.result() for each in comes]
    stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT, wait_for_workers=False)
    stranger.set("default_pg/0//cpu//0/1", "a pickle")
    for one in (first, *others):
        one.note(JOINED)
        assert not one.store.check(["default_pg/0//cpu//0/1"])
    assert first.first_collective() == "all 3 ranks are connected and begin to communicate"


def test_the_store_of_rank_0_lives_as_long_as_torch_has_it(port: int, threads: ThreadPoolExecutor) -> None:
    """torch reads it again for each new group, long after the ranks have met."""
    other = threads.submit(lambda: meet(1, port, world_size=2).store)
    store = meet(0, port, world_size=2).store
    gc.collect()
    other.result().set("key", "value")
    assert store.get("key") == b"value"


def test_a_rank_of_another_run_leaves_and_the_run_goes_on(port: int, threads: ThreadPoolExecutor) -> None:
    """Two runs have one port: each rank of the second one says so, and the first one does not notice."""
    secret = new_secret()
    first = threads.submit(meet, 0, port, secret, 2)
    for other in (new_secret(), ""):
        with pytest.raises(
            RendezvousFailed, match=f"rank 1 of 2 has found another run at 127.0.0.1:{port}, whose rank"
        ):
            meet(1, port, other, 2)
    with pytest.raises(RendezvousFailed, match=f"127.0.0.1:{port}, .* is used by another program"):
        meet(0, port, new_secret(), 2)
    assert not first.done()
    meet(1, port, secret, 2)
    first.result(timeout=10)


def test_a_secret_that_rank_0_does_not_have_is_a_sentence(port: int, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(meet, 0, port, "", 2)
    with pytest.raises(RendezvousFailed, match="does not share this run's secret: set another MASTER_PORT, or"):
        meet(1, port, new_secret(), 2)
    meet(1, port, "", 2)
    first.result(timeout=10)


@pytest.mark.parametrize("proof", [b"", b"f" * 64, b"\xff\x80\n"])
def test_a_stranger_in_a_rank_s_place_ends_all_ranks_with_a_sentence(
    port: int, threads: ThreadPoolExecutor, proof: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The honest ranks as well, before anything is communicated."""
    monkeypatch.setattr(rendezvous, "REFUSAL_S", 0.3)
    secret = new_secret()
    honest = [threads.submit(meet, rank, port, secret) for rank in (0, 2)]
    TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False).set(
        "megalite/come/1",
        proof,  # type: ignore[arg-type]
    )
    expected = (
        f"rank 1 does not know this run's secret: another program or another run has joined at 127.0.0.1:{port}: "
    )
    assert [sentence_of(one).startswith(expected) for one in honest] == [True, True]


def test_ranks_of_one_user_meet_in_a_folder_and_nothing_listens(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir(mode=0o700)
    before = listening()
    others = [threads.submit(meet, rank, 0, **{FOLDER: str(folder)}) for rank in (1, 2)]
    met = [meet(0, 0, **{FOLDER: str(folder)}), *(other.result() for other in others)]
    assert listening() <= before
    assert met[0].first_collective() == "rank 0 of 3 waits in the first collective for 2 others"
    for one in met:
        one.note(JOINED)
    assert met[0].first_collective() == "all 3 ranks are connected and begin to communicate"
    with pytest.raises(RendezvousFailed, match=rf"waited 0.02 minutes in {folder} for 1 other \(rank 3\): look at why"):
        Rendezvous(LIMIT, environment={"RANK": "0", "WORLD_SIZE": "4", FOLDER: str(folder)})
    folder.chmod(0o755)
    with pytest.raises(RendezvousFailed, match="no folder that this user alone can open: set TMPDIR"):
        meet(0, 0, **{FOLDER: str(folder)})


def test_another_program_at_the_place_of_the_store_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and says nothing: torch's own client would wait for ever, whatever its timeout is."""
    monkeypatch.setattr(meeting_store, "GREETING_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as alien:
        address = f"127.0.0.1:{alien.getsockname()[1]}"
        with pytest.raises(RendezvousFailed, match=f"cannot reach rank 0 at {address}: what listens there has not"):
            meet(1, alien.getsockname()[1])


def test_a_store_listens_on_the_address_where_the_ranks_meet(
    port: int, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 stands for one interface of several; where rank 0 has no such address, all are open and it says so."""
    other = threads.submit(meet, 1, port, world_size=2, MASTER_ADDR="127.0.0.2")
    first = meet(0, port, world_size=2, MASTER_ADDR="127.0.0.2")
    assert other.result() and listening(port) == {"127.0.0.2"} and not caplog.records
    del first
    monkeypatch.setattr(meeting_store, "listen", lambda address, port: None)
    port = free_port()
    other = threads.submit(meet, 1, port, world_size=2)
    first = meet(0, port, world_size=2)
    assert first and other.result() and listening(port) in ({"::"}, {"0.0.0.0"})
    assert f"on all interfaces of its host, port {port}, because" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
