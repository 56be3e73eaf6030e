"""Parameters and blocks of each pipeline stage, counted from the model's options. Pure arithmetic, no torch.

The counts are those of the layers that models/decoder.py builds, padding included; tests compare them with the layers
of every family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megalite.config import Config, ModelConfig, ResolvedLayout
from megalite.parallel.mesh import block_cost, head_cost, stage_boundaries


@dataclass(frozen=True)
class StageShape:
    """Layers that one tensor-parallel rank of a pipeline stage holds."""

    parameters: int  # numbers, before ZeRO cuts them, padding included
    blocks: int
    has_embedding: bool
    has_head: bool
    first_block: int = 0


@lru_cache(maxsize=4096)
def stage_shapes(model: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int) -> tuple[StageShape, ...]:
    """Returns the shape of each stage, in order."""
    return _shapes(model, tensor_parallel_size, block_bounds(model, pipeline_parallel_size))


@lru_cache(maxsize=4096)
def even_stage_shapes(
    model: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int
) -> tuple[StageShape, ...]:
    """Returns the shapes of stages with equally many blocks, as other stacks divide them."""
    blocks, pp = model.num_hidden_layers, pipeline_parallel_size
    return _shapes(model, tensor_parallel_size, tuple(-(-blocks * stage // pp) for stage in range(pp + 1)))


def _shapes(model: ModelConfig, tp: int, bounds: tuple[int, ...]) -> tuple[StageShape, ...]:
    pp, shapes = len(bounds) - 1, []
    for stage in range(pp):
        first, end = bounds[stage], bounds[stage + 1]
        numbers = sum(block_parameters(model, layer, tp) for layer in range(first, end))
        is_first, is_last = stage == 0, stage == pp - 1
        if is_first:
            numbers += embedding_parameters(model, tp)
            if model.position_embedding == "learned":
                numbers += model.max_position_embeddings * model.hidden_size
        if is_last:
            numbers += norm_parameters(model, model.hidden_size)
            if not (model.tie_word_embeddings and is_first):  # a tied copy on its embedding's stage adds nothing
                numbers += embedding_parameters(model, tp)
        shapes.append(StageShape(numbers, end - first, is_first, is_last, first))
    return tuple(shapes)


@lru_cache(maxsize=256)
def block_bounds(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Returns bounds b: stage s has blocks `b[s]:b[s+1]`. Raises ValueError if there are fewer blocks than stages."""
    blocks = model.num_hidden_layers
    before = 2 if model.position_embedding == "learned" else 1  # embeddings
    costs = [0.0] * before + [block_cost(model, layer) for layer in range(blocks)] + [0.0, head_cost(model)]
    is_block = [False] * before + [True] * blocks + [False, False]
    inner = stage_boundaries(costs, is_block, stages)[1:-1]
    return (0, *(min(max(bound - before, 0), blocks) for bound in inner), blocks)


@lru_cache(maxsize=256)
def block_kinds(model: ModelConfig) -> tuple[int, ...]:
    """Returns for each block the first one that needs the same time and memory."""
    first: dict[tuple[bool, bool, bool], int] = {}
    return tuple(
        first.setdefault((model.has_experts(layer), model.has_window(layer), model.rotary_dim(layer) > 0), layer)
        for layer in range(model.num_hidden_layers)
    )


def stages_of(config: Config, layout: ResolvedLayout) -> tuple[StageShape, ...]:
    """Returns the stages of a run."""
    return stage_shapes(config.model, layout.tensor_parallel_size, layout.pipeline_parallel_size)


def parameters(model: ModelConfig) -> int:
    """Returns the parameters of the whole model, without padding; a tied weight counts once."""
    return stage_shapes(model, 1, 1)[0].parameters


def embedding_parameters(model: ModelConfig, tp: int) -> int:
    """Returns the parameters of a rank's rows of the token embedding or the head."""
    return cut(model.vocab_size, tp) * model.hidden_size


def block_parameters(model: ModelConfig, layer: int, tp: int) -> int:
    """Returns the parameters of one rank's part of a block."""
    norms = {"pre": 2, "post": 2, "pre_and_post": 4}[model.norm_placement] * norm_parameters(model, model.hidden_size)
    return attention_parameters(model, tp) + feed_forward_parameters(model, layer, tp) + norms


def attention_parameters(model: ModelConfig, tp: int) -> int:
    """Returns the parameters of projections, their biases, and the norms of queries and keys."""
    hidden = model.hidden_size
    query, key_value = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    rows = cut(query, tp) + 2 * cut(key_value, tp)
    numbers = rows * (hidden + model.attention_bias) + cut(query, tp) * hidden
    numbers += hidden * model.attention_output_bias
    if model.query_key_norm == "per_head":
        numbers += 2 * norm_parameters(model, model.head_dim)
    elif model.query_key_norm == "full_width":
        numbers += cut(query, tp) + cut(key_value, tp)
    return numbers


def feed_forward_parameters(model: ModelConfig, layer: int, tp: int) -> int:
    """Returns the parameters of the dense layer, or of router and experts."""
    hidden = model.hidden_size
    if model.has_experts(layer):
        assert model.num_experts is not None
        return model.num_experts * (hidden + 3 * cut(model.moe_intermediate_size, tp) * hidden)
    features, matrices = cut(model.intermediate_size, tp), 3 if model.gated_mlp else 2
    biases = features * (matrices - 1) + hidden if model.mlp_bias else 0
    return matrices * features * hidden + biases


def norm_parameters(model: ModelConfig, features: int) -> int:
    """Returns the parameters of a norm; LayerNorm has a bias beside its weight."""
    return features * (2 if model.normalization == "layernorm" else 1)


def cut(size: int, tp: int) -> int:
    """Returns a rank's part of `size`, padding included."""
    return -(-size // tp)
