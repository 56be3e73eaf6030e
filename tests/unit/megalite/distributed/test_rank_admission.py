"""Where ranks meet is open to nobody else: folders of one user, sockets on one address, proofs of a secret."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from launch.runtime.local_ranks import free_port
from megalite.distributed.rank_admission import SharedSecret, is_private, listen, new_secret, private_folder


def test_a_private_folder_is_for_one_user_and_leaves_nothing(tmp_path: Path) -> None:
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and is_private(folder)
        (folder / "store").write_text("")
    assert not folder.exists()
    open_to_all, link = tmp_path / "open", tmp_path / "link"
    open_to_all.mkdir(mode=0o755)
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    link.symlink_to(mine)
    assert is_private(mine) and not any(map(is_private, (open_to_all, link, tmp_path / "missing")))
    if os.geteuid() == 0:
        os.chown(mine, 65534, -1)
        assert not is_private(mine), "its owner can open it"


def test_a_socket_listens_on_one_address_alone() -> None:
    port = free_port()
    with listen("127.0.0.2", port) as listener:  # type: ignore[union-attr]
        assert listener.getsockname() == ("127.0.0.2", port)
        socket.create_connection(("127.0.0.2", port), 1).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
        with pytest.raises(OSError) as taken:
            listen("127.0.0.2", port)
        assert taken.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("address", [socket.gethostname(), "node1", "198.51.100.7", "2001:db8::7"])
def test_no_socket_where_other_hosts_may_not_find_it(address: str) -> None:
    """A name, which may stand for another address there, and addresses behind a NAT."""
    assert listen(address, free_port()) is None


def test_a_proof_is_good_for_one_claim_of_one_attempt() -> None:
    mine = SharedSecret(new_secret(), 4)
    proof = mine.proof("rank 1")
    assert mine.proves("rank 1", proof) and not mine.proves("rank 2", proof) and not mine.proves("rank 1", "")
    same = SharedSecret(mine._key.decode(), 4, mine.challenge)
    assert same.opens(mine.challenge) and same.proves("rank 1", proof)
    assert not SharedSecret(mine._key.decode(), 4).proves("rank 1", proof), "another challenge"
    assert not SharedSecret(mine._key.decode(), 8, mine.challenge).opens(mine.challenge), "another number of ranks"
    assert not SharedSecret(new_secret(), 4, mine.challenge).opens(mine.challenge), "another attempt"
    assert len(bytes.fromhex(new_secret())) == 32 and mine._key.decode() not in mine.challenge
