"""Goodput of long runs, as a model and as a simulation."""
