"""The host of a rank, as ranks tell each other."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> tuple[str, str]:
    """Returns this host's name and the boot of its machine, empty where that cannot be read.

    Containers of one machine have names of their own; processes of one boot share `time.monotonic`.
    """
    boot = ""
    with suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    return socket.gethostname(), boot
