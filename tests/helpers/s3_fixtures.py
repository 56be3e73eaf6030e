"""A real S3 server, for the tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.helpers.s3_server import Gate, gate, s3_server


@cache
def own_client() -> Any:
    """For what no Store offers."""
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The server, with a bucket `bucket` once `s3` has been used."""
    with s3_server() as port:
        yield port


@pytest.fixture(scope="module")
def s3(s3_port: int) -> Iterator[Gate]:
    """A gate before the server; credentials and endpoint come from the environment, as for a user."""
    with pytest.MonkeyPatch.context() as patch, gate(s3_port) as opened:
        patch.setenv("AWS_ENDPOINT_URL", opened.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "a-key-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        own_client.cache_clear()
        own_client().makedirs("bucket", exist_ok=True)
        yield opened


@pytest.fixture
def place(s3: Gate, request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder of its own on a server that works, and works again afterwards."""
    s3.mend()
    s3.is_open.clear()
    s3.seen.clear()
    yield f"s3://bucket/{request.node.name}"
    s3.mend()
