"""Smaller messages between replicas: codecs of gradients and of changes of weights, and exchanges with them."""
