"""Fixtures of a real S3 server and of a checkpoint to be damaged."""

from tests.helpers.checkpoint_fixtures import folder, place, s3, s3_port, whole

__all__ = ["folder", "place", "s3", "s3_port", "whole"]
