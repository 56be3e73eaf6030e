"""What an engine does once a step, for layers that tests run without one."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from megalite.parallel.collectives import TensorParallel


def sum_parts(module: nn.Module, tp: TensorParallel) -> None:
    """Sums the gradients of parameters that each rank has used on its slice of the sequence."""
    for parameter in module.parameters():
        if getattr(parameter, "is_summed_at_step", False) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=tp.group)
