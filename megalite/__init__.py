"""Trains transformers with tensor, context, pipeline and data parallelism on DeepSpeed's engines."""
