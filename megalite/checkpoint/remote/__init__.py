"""Checkpoints in object storage: mirror and fetch."""
