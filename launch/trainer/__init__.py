"""One rank of a run around the loop: log, hooks of checkpoints, tokenizer, summary."""
