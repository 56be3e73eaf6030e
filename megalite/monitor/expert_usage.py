"""Measures how routers have used their experts since the last entry of the log: a few numbers for each block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.engine import Engine
from megalite.parallel.expert_balance import expert_balances

Usage = dict[str, dict[str, float]]  # by block, as `layer_3`


class ExpertUsage:
    """Gathers how often experts were chosen. Between two entries of the log the counts stay on the device."""

    def __init__(self, engine: Engine, group: dist.ProcessGroup | None) -> None:
        """`group` is of all ranks on the CPU; None for a rank alone."""
        model = engine.config.model
        self._layers = [layer for layer in range(model.num_hidden_layers) if model.has_experts(layer)]
        self._experts, self._top_k, self._group = model.num_experts or 0, model.num_experts_per_tok, group
        self._balances = {layer: balance for layer, _, balance in expert_balances(engine.deepspeed.module)}
        self._is_counted = engine.coordinate.tensor_rank == 0  # all tensor-parallel ranks make the same choices

    def gather(self) -> Usage:
        """Returns the usage by all replicas since the last call. Collective, and waits for the device."""
        if not self._layers:
            return {}
        own = {layer: balance.take() for layer, balance in self._balances.items()}
        nothing = torch.zeros(self._experts + 1, dtype=torch.float64)
        numbers = torch.stack([own.get(layer, nothing) * self._is_counted for layer in self._layers])
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)
        return usage_of(dict(zip(self._layers, numbers, strict=True)), self._top_k)


def usage_of(numbers: Mapping[int, Tensor], top_k: int) -> Usage:
    """Returns for each block from `ExpertBalance.take`'s sums over replicas: how many times the mean number of tokens
    the most popular expert got, how many experts got none, and the mean entropy of the router's scores in nats."""
    usage: Usage = {}
    for layer, row in numbers.items():
        chosen, entropy = row[:-1], float(row[-1])
        if (choices := float(chosen.sum())) > 0:
            usage[f"layer_{layer}"] = {
                "max_over_mean": round(float(chosen.max()) * len(chosen) / choices, 4),
                "dead": int((chosen == 0).sum()),
                "entropy": round(entropy * top_k / choices, 4),
            }
    return usage
