"""Gradients of replicas: summed and reduced in buckets, then norm, clipping and the update of a partition."""
