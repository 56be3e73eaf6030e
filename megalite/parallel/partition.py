"""Partition of layers into pipeline stages: the contiguous cut whose slowest stage is fastest.

In: a relative cost per layer and the number of stages. Out: boundaries. Pure integers and floats, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config import ModelConfig


def block_cost(model: ModelConfig, layer: int) -> float:
    """Returns multiply-adds per token, without attention scores and the common factor of forward and backward."""
    hidden = model.hidden_size
    attention = hidden * model.head_dim * 2 * (model.num_attention_heads + model.num_key_value_heads)
    if not model.has_experts(layer):
        return float(attention + hidden * model.intermediate_size * (3 if model.gated_mlp else 2))
    assert model.num_experts is not None
    active = 3 * model.num_experts_per_tok * model.moe_intermediate_size
    return float(attention + hidden * (model.num_experts + active))


def head_cost(model: ModelConfig) -> float:
    """Returns the same for the output head."""
    return float(model.hidden_size * model.vocab_size)


def stage_boundaries(costs: Sequence[float], is_block: Sequence[bool], stages: int) -> tuple[int, ...]:
    """Returns boundaries `b` with stage `s` holding layers `b[s]:b[s+1]`, minimising the largest stage cost.

    Every stage gets at least one block: DeepSpeed's ZeRO optimizer does one collective per parameter group in the
    gradient norm and drops empty groups, so a stage without both matrices and norms would hang the job
    (DeepSpeed#1522). Exact dynamic programming, O(layers^2 * stages); among equals later stages get fewer layers.

    Raises ValueError when there are fewer blocks than stages.
    """
    if sum(is_block) < stages:
        raise ValueError(f"{sum(is_block)} blocks cannot fill {stages} stages")
    count = len(costs)
    prefix = [0.0]
    blocks = [0]
    for cost, block in zip(costs, is_block, strict=True):
        prefix.append(prefix[-1] + cost)
        blocks.append(blocks[-1] + block)
    infinity = float("inf")
    best = [[infinity] * (count + 1) for _ in range(stages + 1)]  # [stages used][layers placed] -> slowest stage
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for used in range(1, stages + 1):
        for end in range(1, count + 1):
            for start in range(end):
                if blocks[end] == blocks[start] or best[used - 1][start] == infinity:
                    continue
                slowest = max(best[used - 1][start], prefix[end] - prefix[start])
                if slowest <= best[used][end]:
                    best[used][end], cut[used][end] = slowest, start
    boundaries = [count]
    for used in range(stages, 0, -1):
        boundaries.append(cut[used][boundaries[-1]])
    return tuple(reversed(boundaries))
