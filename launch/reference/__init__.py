"""Models on one process to compare with: transformers' own class and ours, probes for both, their logits."""

LOGITS_TOLERANCE = 1e-5
"""In float32, relative to the logits' standard deviation: both models run the same operations."""
