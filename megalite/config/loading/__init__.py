"""Reads files, overrides and variables into a config, without secrets in it."""
