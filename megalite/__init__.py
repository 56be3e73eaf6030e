"""Trains transformers in three dimensions of parallelism on DeepSpeed's engines."""
