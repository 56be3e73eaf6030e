"""Fixtures of a real S3 server and of a checkpoint to be damaged."""

from tests.helpers.checkpoint_fixtures import folder, whole
from tests.helpers.s3_fixtures import place, s3, s3_port

__all__ = ["folder", "place", "s3", "s3_port", "whole"]
