"""Predicts memory and time of a run on the machines at hand, and chooses a layout by that."""
