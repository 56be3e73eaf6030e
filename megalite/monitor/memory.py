"""How much memory this rank has needed at most."""

from __future__ import annotations

import resource

import torch


def peak_memory_mib() -> float:
    """MiB: allocated on the GPU where there is one, else the process's largest resident set."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
