"""Keeps strangers out of where ranks meet: a private folder, a socket on one address, or a shared secret.

Ranks that one command starts on its host meet in a folder that only its user can open, so nothing listens for others
and whoever gets in is known. All other ranks meet over TCP, at a store that cannot ask who is there. Those who start
ranks on several hosts give them a secret; each rank proves that it knows it before anything is communicated. That keeps
out strangers, and ranks of another run that has the same port. It is no encryption: whoever can change what travels
between the hosts can change the run.

No torch here, so that what starts ranks can import it.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

FOLDER = "MEGALITE_RENDEZVOUS"  # environment variable of ranks on one host: the private folder where they meet
ATTEMPT = "MEGALITE_ATTEMPT"  # environment variable of supervised ranks: the name of their attempt
SECRET = "MEGALITE_ATTEMPT_SECRET"  # environment variable of ranks on several hosts: what they prove to know
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" where torchrun's own process serves the store of the ranks
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Makes a folder that only this user can open, in the system's temporary folder, and removes it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="megalite_ranks_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_private(folder: Path) -> bool:
    """Returns whether `folder` is one, belongs to this user, and nobody else can open it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def use_loopback(environment: MutableMapping[str, str]) -> None:
    """Restricts gloo and NCCL to the loopback interface, as all ranks are on this host, unless the user has chosen."""
    environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # NCCL takes a prefix without the "="; between GPUs of one host only its start goes over sockets
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")


def is_served(environment: Mapping[str, str]) -> bool:
    """Returns whether torchrun's own process serves the store, which has no place for an attempt's secret."""
    return environment.get(AGENT_STORE) == "True" and SECRET not in environment


def is_loopback_address(text: str) -> bool:
    """Returns whether `text` is a loopback address, or a name that stands for one on every host."""
    if text.startswith("localhost"):
        return True
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def listen(address: str, port: int) -> socket.socket | None:
    """Returns a socket that listens on one address of this host alone.

    None if `address` is no address of this host's own, as behind a NAT, or a name other than localhost: on other hosts
    it may stand for another address of this host. Raises OSError if the port is taken.
    """
    if address.startswith("localhost"):
        family = socket.AF_INET
    else:
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        except ValueError:
            return None
    try:
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return None


def new_secret() -> str:
    """Returns a secret for the ranks of one attempt: 32 random bytes in hexadecimal digits."""
    return secrets.token_hex(32)


class SharedSecret:
    """Proofs by which ranks show each other that they know one secret, without showing it.

    Rank 0 opens with a random challenge. Every proof is an HMAC over it, the number of ranks, and who proves what, so
    that none can be used for another purpose. A secret belongs to one attempt, whose ranks meet once.
    """

    def __init__(self, secret: str, world_size: int, challenge: str = "") -> None:
        """`challenge` is what rank 0 has published; rank 0 itself leaves it out and makes a new one."""
        self._key, self._world_size = secret.encode(), world_size
        self._nonce = challenge.partition(" ")[0] or secrets.token_hex(16)

    def proof(self, claim: str) -> str:
        """Returns the HMAC by which its owner proves `claim`."""
        message = f"{self._world_size} {self._nonce} {claim}".encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()

    def proves(self, claim: str, proof: str) -> bool:
        """Returns whether `proof` comes from somebody who knows the secret."""
        return hmac.compare_digest(proof.encode(), self.proof(claim).encode())

    @property
    def challenge(self) -> str:
        """The challenge with rank 0's own proof."""
        return f"{self._nonce} {self.proof('rank 0')}"

    def opens(self, challenge: str) -> bool:
        """Returns whether the one who has published `challenge` knows the secret."""
        return self.proves("rank 0", challenge.partition(" ")[2])
