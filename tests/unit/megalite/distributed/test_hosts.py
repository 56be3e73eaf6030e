"""The host of a rank where the machine hides parts of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megalite.distributed import hosts


def test_a_boot_that_cannot_be_read_is_empty_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may mask it: one rank that raised would leave the others waiting for it."""
    assert hosts.this_host() == hosts.this_host() and hosts.this_host()[0] == socket.gethostname()
    for hidden in (tmp_path, tmp_path / "none"):  # a folder cannot be read as a text, not even by root
        monkeypatch.setattr(hosts, "BOOT_ID", hidden)
        assert hosts.this_host() == (socket.gethostname(), "")
