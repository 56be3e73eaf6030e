"""Where a run's records go: one file per sink; rank 0 only."""
