"""Foreign checkpoints in and out, a room for each format."""
