"""Costs of a layout: bytes, seconds, traffic, saves."""
