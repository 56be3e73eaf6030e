"""The mesh of ranks and the layers of its pipeline stages.

`Mesh` is the one expression that relates a global rank to its pipeline, data and tensor coordinates; `stage_boundaries`
is the contiguous cut of the layers whose slowest stage is fastest. Numbers only, no torch: dry runs and the planner use
them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Self

from megalite.config import ModelConfig, ResolvedLayout


@dataclass(frozen=True)
class Coordinate:
    """Position of one rank on the axes."""

    pipeline_rank: int
    replica: int  # number of its copy of the weights: `data_rank * context_parallel_size + context_rank`
    tensor_rank: int
    data_rank: int  # which samples it takes
    context_rank: int  # which part of each


@dataclass(frozen=True)
class Mesh:
    """The sizes of a layout; tensor-parallel neighbours are adjacent ranks, then context-parallel ones, stages are
    furthest apart.

    The order is DeepSpeed's `PipeModelDataParallelTopology` (pipe, data, model), so that both agree on every group.
    Its data axis is that of `replicas`: ranks that share sequences hold the same weights too.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1

    @classmethod
    def of(cls, layout: ResolvedLayout) -> Self:
        """Takes the sizes from a resolved layout."""
        sizes = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size
        return cls(*sizes, layout.context_parallel_size, layout.expert_parallel_size)

    @property
    def replicas(self) -> int:
        """Copies of the weights, over which gradients are summed and ZeRO cuts."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def copies_of_experts(self) -> int:
        """Copies of each expert's weights: replicas in a row deal a layer's experts among themselves."""
        return self.replicas // self.expert_parallel_size

    def sharing_experts(self, replica: int) -> range:
        """Returns the replicas that have the experts of a layer between them, of which `replica` is one."""
        first = replica - replica % self.expert_parallel_size
        return range(first, first + self.expert_parallel_size)

    def with_experts_of(self, replica: int) -> range:
        """Returns the replicas that hold the same experts as `replica`."""
        return range(replica % self.expert_parallel_size, self.replicas, self.expert_parallel_size)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.replicas

    def rank(self, pipeline_rank: int, replica: int, tensor_rank: int) -> int:
        """Returns the global rank of a coordinate."""
        return (pipeline_rank * self.replicas + replica) * self.tensor_parallel_size + tensor_rank

    def coordinate(self, rank: int) -> Coordinate:
        """Returns the coordinate of a global rank, the inverse of `rank`."""
        outer, tensor_rank = divmod(rank, self.tensor_parallel_size)
        pipeline_rank, replica = divmod(outer, self.replicas)
        return Coordinate(pipeline_rank, replica, tensor_rank, *divmod(replica, self.context_parallel_size))

    def place(self, rank: int) -> str:
        """Describes the coordinate of a global rank on the axes that are cut, as in "stage 1, replica 0"."""
        at = self.coordinate(rank)
        axes = (
            ("stage", at.pipeline_rank, self.pipeline_parallel_size),
            ("replica", at.data_rank, self.data_parallel_size),
            ("context rank", at.context_rank, self.context_parallel_size),
            ("tensor rank", at.tensor_rank, self.tensor_parallel_size),
        )
        return ", ".join(f"{name} {index}" for name, index, size in axes if size > 1)

    def __str__(self) -> str:
        sizes = f"tp={self.tensor_parallel_size} pp={self.pipeline_parallel_size} dp={self.data_parallel_size}"
        more = {"cp": self.context_parallel_size, "ep": self.expert_parallel_size}
        return " ".join([sizes, *(f"{name}={size}" for name, size in more.items() if size > 1)])


class Matrix(NamedTuple):
    """One of Hugging Face's matrices, and which side of it tensor-parallel ranks cut."""

    name: str
    inputs: int
    outputs: int
    cut: Literal["inputs", "outputs", "none"]
    has_bias: bool = False

    def sides(self, tp: int) -> tuple[int, int]:
        """Returns inputs and outputs on one of `tp` ranks, padding included."""
        parts = tp if self.cut == "inputs" else 1, tp if self.cut == "outputs" else 1
        return -(-self.inputs // parts[0]), -(-self.outputs // parts[1])


@lru_cache(maxsize=256)
def attention_matrices(model: ModelConfig) -> tuple[Matrix, ...]:
    """Returns the matrices of a block's attention, in order."""
    hidden, query, bias = model.hidden_size, model.num_attention_heads * model.head_dim, model.attention_bias
    if model.kv_lora_rank is None:
        key_value = model.num_key_value_heads * model.head_dim
        columns = (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value))
        found = [Matrix(name, hidden, size, "outputs", bias) for name, size in columns]
        return (*found, Matrix("o_proj", query, hidden, "inputs", model.attention_output_bias))
    nope, rotated, value = model.qk_nope_head_dim or 0, model.qk_rope_head_dim or 0, model.v_head_dim or 0
    found = [Matrix("kv_a_proj_with_mqa", hidden, model.kv_lora_rank + rotated, "none", bias)]
    if model.q_lora_rank is None:
        found.append(Matrix("q_proj", hidden, query, "outputs"))
    else:
        found = [Matrix("q_a_proj", hidden, model.q_lora_rank, "none", bias), *found]
        found.append(Matrix("q_b_proj", model.q_lora_rank, query, "outputs"))
    found.append(Matrix("kv_b_proj", model.kv_lora_rank, model.num_attention_heads * (nope + value), "outputs"))
    output = Matrix("o_proj", model.num_attention_heads * value, hidden, "inputs", model.attention_output_bias)
    return (*found, output)


def block_cost(model: ModelConfig, layer: int) -> float:
    """Returns multiply-adds per token, without attention scores and the common factor of forward and backward."""
    hidden = model.hidden_size
    attention = sum(matrix.inputs * matrix.outputs for matrix in attention_matrices(model))
    if not model.has_experts(layer):
        return float(attention + hidden * model.intermediate_size * (3 if model.gated_mlp else 2))
    assert model.num_experts is not None
    active = 3 * (model.num_experts_per_tok * model.moe_intermediate_size + model.shared_size)
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
            for start in range(end - 1, -1, -1):
                if (mine := prefix[end] - prefix[start]) > best[used][end]:
                    break  # with more layers it only grows
                slowest = max(best[used - 1][start], mine)
                if slowest < best[used][end] and blocks[end] > blocks[start]:
                    best[used][end], cut[used][end] = slowest, start
    boundaries = [count]
    for used in range(stages, 0, -1):
        boundaries.append(cut[used][boundaries[-1]])
    return tuple(reversed(boundaries))
