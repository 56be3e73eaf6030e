"""Series of runs of one config, and their comparison: `megalite bench` and `megalite scaling`."""
