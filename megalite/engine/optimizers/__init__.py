"""Optimizers, as a config names them."""
