"""Counts that a step makes beside its loss: tokens of experts and their bias, losses of sources."""
