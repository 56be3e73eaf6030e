"""Models on one process to compare with: transformers' own class and ours, probes for both, their logits."""
