"""The store at which ranks meet over TCP: torch's TCPStore, served by rank 0 or by torchrun's own process."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from megalite.distributed.rank_admission import listen

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

ANSWER_S = 5.0  # for the host of the store to answer
GREETING_S = 15.0  # for the store itself, whose thread needs neither Python nor its rank's main thread
RETRY_S = 0.2


def serve(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Starts rank 0's store, on one address of this host if `address` stands for one."""
    listener = listen(address, port)
    if listener is None:
        log.warning(
            f"rank 0 waits for the others on all interfaces of its host, port {port}, because they may know {address} "
            "by another address than this host does: launch.interface names one interface"
        )
        return TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)
    own, port = listener.getsockname()[:2]
    return TCPStore(
        own, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join(address: str, port: int, timeout: timedelta, patience_s: float) -> TCPStore:
    """Connects to a store that may come within `patience_s`. Raises OSError if it does not, or DistError.

    torch would wait too, but log its C++ frames again and again.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((address, port), ANSWER_S).close()
            return _greeted(address, port, timeout)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def _greeted(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Returns a connection to the store. Raises DistError where something else listens, for which torch would wait."""
    connect = partial(TCPStore, address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    try:
        return answered_within(GREETING_S, connect)
    except TimeoutError:
        raise DistError(
            f"what listens there has not answered for {GREETING_S:.0f} s, as another program would, or a host that is "
            "frozen: set another MASTER_PORT"
        ) from None


def answered_within(limit_s: float, ask: Callable[[], Answer]) -> Answer:
    """Returns what `ask` returns. Raises TimeoutError: torch's client waits without a limit for a frozen server."""
    found: Future[Answer] = Future()

    def run() -> None:
        try:
            found.set_result(ask())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, name="request to the store", daemon=True).start()
    return found.result(limit_s)
