"""Measures how routers have used their experts since the last entry of the log: a few numbers for each block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.engine import Engine
from megalite.engine.step_result import StepResult

Usage = dict[str, dict[str, float]]  # by block, as `layer_3`


class ExpertUsage:
    """Adds up how often experts were chosen, and gathers it for an entry of the log."""

    def __init__(self, engine: Engine, group: dist.ProcessGroup | None) -> None:
        """`group` is of all ranks on the CPU; None for a rank alone."""
        model = engine.config.model
        self._layers = [layer for layer in range(model.num_hidden_layers) if model.has_experts(layer)]
        self._top_k, self._group = model.num_experts_per_tok, group
        self._sums = torch.zeros(len(self._layers), (model.num_experts or 0) + 1, dtype=torch.float64)
        self._own_rows = [self._layers.index(layer) for layer, _, _ in engine.balances]
        self._is_counted = engine.coordinate.tensor_rank == 0  # all tensor-parallel ranks make the same choices

    def add(self, result: StepResult) -> None:
        """Adds the choices of a step whose result is read, if it was taken."""
        usage = result.readback.expert_usage
        if usage is not None and result.taken and self._is_counted:
            self._sums[self._own_rows] += usage

    def gather(self) -> Usage:
        """Returns the usage by all replicas in the steps since the last call. Collective."""
        if not self._layers:
            return {}
        numbers, self._sums = self._sums, torch.zeros_like(self._sums)
        if self._group is not None:
            dist.all_reduce(numbers, group=self._group)
        return usage_of(dict(zip(self._layers, numbers, strict=True)), self._top_k)


def usage_of(numbers: Mapping[int, Tensor], top_k: int) -> Usage:
    """Returns for each block from sums of `ExpertCounts.usage` over replicas: how many times the mean number of tokens
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
