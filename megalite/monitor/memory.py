"""Peak memory of this rank."""

from __future__ import annotations

import resource

import torch


def peak_memory_mib() -> float:
    """Returns the peak in MiB: of memory allocated on the GPU if there is one, else of the process's resident set."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
