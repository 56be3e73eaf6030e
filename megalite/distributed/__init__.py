"""Rendezvous and agreement of ranks without DeepSpeed: the store, its secret, failures of the start, messages."""
