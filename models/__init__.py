"""The decoder: math on local tensors."""
