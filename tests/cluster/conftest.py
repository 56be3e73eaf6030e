"""Hosts for tests: shared ones for those that leave them whole, own ones for those that break them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.conftest import references as references  # a fixture here as well
from tests.helpers.cluster_machine import why_no_hosts
from tests.helpers.hosts import Cluster


@pytest.fixture(scope="session")
def can_make_hosts() -> None:
    """Skips, and says why, where this machine cannot make hosts."""
    if reason := why_no_hosts():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def two_hosts(can_make_hosts: None) -> Iterator[Cluster]:
    """`node1`, `node2` and `head`, for a module whose tests leave them as they were."""
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def cluster_of(can_make_hosts: None) -> Iterator[Callable[..., Cluster]]:
    """Makes a cluster, with what `Cluster` takes, that a test may do to what it likes; ended with the test."""
    with ExitStack() as clusters:

        def start(n: int = 2, **options: Any) -> Cluster:
            return clusters.enter_context(Cluster(n, **options))

        yield start
