"""A real S3 server."""

from tests.helpers.s3_fixtures import place, s3, s3_port

__all__ = ["place", "s3", "s3_port"]
