"""What `megalite checkpoint` does: listing, facts, verification, difference and pruning of checkpoints."""
