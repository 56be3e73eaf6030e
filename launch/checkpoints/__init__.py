"""Listing, summary, verification, comparison and pruning of checkpoints, for `megalite checkpoint`."""
