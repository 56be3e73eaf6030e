"""References run on one thread, in every test of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def on_one_thread(one_thread: None) -> None:
    """Before any reference is computed."""
