"""The optimizer of a run, and the moments that it keeps of each parameter.

It is torch's where torch has it: DeepSpeed's own would compile kernels at start. Ours are AdamW with moments of 16 bits
(adamw.py) and Muon (muon.py). On the host it may be DeepSpeed's (cpu_adam.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from megalite.config.sections import OptimizerConfig
from megalite.engine.optimizers.adamw import CompactAdamW
from megalite.engine.optimizers.muon import Muon, is_orthogonalized

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": (), "muon": ("exp_avg", "exp_avg_sq")}  # by `optimizer.name`
OF_MATRICES = {**MOMENTS, "muon": ("momentum_buffer",)}  # of those that Muon orthogonalizes


def moments_of(parameter: nn.Parameter, optimizer: str) -> tuple[str, ...]:
    """Returns the names of the state tensors that `optimizer.name` keeps of a parameter; none of one that is frozen."""
    if not parameter.requires_grad:
        return ()
    return (OF_MATRICES if is_orthogonalized(parameter.shard) else MOMENTS)[optimizer]  # type: ignore[attr-defined]


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    options: OptimizerConfig,
    bucket_size: int,
    *,
    has_cpu_adam: bool = False,
) -> torch.optim.Optimizer:
    """Builds the optimizer: matrices decay, vectors (norms and biases) do not.

    There is a group for each bucket of gradients, of at most `bucket_size` numbers: ZeRO cuts each group into one
    partition per replica, so that the group's gradients can be reduce-scattered together. Experts that are dealt over
    replicas have groups of their own, which say `is_dealt`: fewer replicas hold them.

    `has_cpu_adam`: the parameters it will update are on the host, and DeepSpeed's Adam for the CPU is usable.
    """
    parameters = list(parameters)
    is_muon = options.name == "muon"
    matrices = [p for p in parameters if len(p.shard.shape) > 1]  # type: ignore[attr-defined]
    vectors = [p for p in parameters if len(p.shard.shape) == 1]  # type: ignore[attr-defined]
    hidden = [p for p in matrices if is_muon and is_orthogonalized(p.shard)]  # type: ignore[attr-defined]
    taken = set(hidden)
    kinds = (
        (hidden, {"weight_decay": options.weight_decay, "is_orthogonalized": True}),
        ([p for p in matrices if p not in taken], {"weight_decay": options.weight_decay}),
        (vectors, {"weight_decay": 0.0}),
    )
    groups: list[dict[str, Any]] = [
        {"params": bucket, "is_dealt": is_dealt, **values}
        for alike, values in kinds
        for is_dealt in (False, True)
        for bucket in _buckets([p for p in alike if p.shard.is_dealt == is_dealt], bucket_size)  # type: ignore[attr-defined]
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, fused=True)
    if is_muon:
        return Muon(groups, options)
    if has_cpu_adam:
        return DeepSpeedCPUAdam(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
    if options.moments_dtype != "fp32":
        return CompactAdamW(groups, options)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)


def _buckets(parameters: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Cuts a list into runs of at most `size` numbers, or of one parameter that has more."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        numbers = prod(parameter.shard.local_shape)  # type: ignore[attr-defined]  # ZeRO-3 holds nothing of it now
        if numbers > room:
            buckets.append([])
            room = size
        buckets[-1].append(parameter)
        room -= numbers
    return buckets
