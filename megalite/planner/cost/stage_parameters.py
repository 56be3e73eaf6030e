"""Parameters and blocks of each pipeline stage, counted from the model's options. Pure arithmetic, no torch.

The counts are those of the layers that models/decoder.py builds, padding included; tests compare them with the layers
of every family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from megalite.config import Config, ModelConfig, ResolvedLayout
from megalite.config.sections import PipelineSchedule
from megalite.parallel.mesh import attention_matrices, block_cost, head_cost, stage_boundaries
from megalite.planner.workload import Recompute, TrainingWorkload
from megalite.schedules.tables import Schedule, placement, positions_by_stage


@dataclass(frozen=True)
class ChunkBlocks:
    """Blocks of one chunk of a stage, consecutive in the model."""

    first: int
    count: int


@dataclass(frozen=True)
class StageShape:
    """Layers that one tensor-parallel rank of a pipeline stage holds."""

    parameters: int  # numbers, before ZeRO cuts them, padding included
    experts: int  # those of them that belong to experts, of which fewer replicas may hold the same
    chunks: tuple[ChunkBlocks, ...]  # in their order in the model
    has_embedding: bool
    has_head: bool
    tied_copy: int = 0  # numbers of a tied head whose embedding is on another stage: no parameter here
    kinds: Mapping[int, int] = field(default_factory=dict, compare=False)  # a block of each, and how many there are
    like: int = 0  # the first stage of the model that needs the same time and memory for a micro-batch

    @property
    def blocks(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of its blocks."""
        return tuple(layer for chunk in self.chunks for layer in range(chunk.first, chunk.first + chunk.count))


@lru_cache(maxsize=4096)
def stage_shapes(
    model: ModelConfig,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    schedule: PipelineSchedule = "1f1b",
    chunks: int = 1,
    expert_parallel_size: int = 1,
) -> tuple[StageShape, ...]:
    """Returns the shape of each stage, in order. Raises ValueError if there are fewer blocks than chunks."""
    where = placement(Schedule(schedule), pipeline_parallel_size, chunks)
    return _shapes(model, tensor_parallel_size, expert_parallel_size, block_bounds(model, len(where)), where)


@lru_cache(maxsize=4096)
def even_stage_shapes(
    model: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int, expert_parallel_size: int = 1
) -> tuple[StageShape, ...]:
    """Returns the shapes of stages with equally many blocks, as other stacks divide them. A tied head is a parameter of
    the last stage too."""
    blocks, pp = model.num_hidden_layers, pipeline_parallel_size
    bounds = tuple(-(-blocks * stage // pp) for stage in range(pp + 1))
    shapes = _shapes(model, tensor_parallel_size, expert_parallel_size, bounds, range(pp))
    return tuple(replace(shape, parameters=shape.parameters + shape.tied_copy) for shape in shapes)


def _shapes(
    model: ModelConfig, tp: int, ep: int, bounds: Sequence[int], where: Sequence[int]
) -> tuple[StageShape, ...]:
    """Returns the shapes of the stages that hold the chunks between `bounds`."""
    shapes: list[StageShape] = []
    kinds, first = block_kinds(model), dict[object, int]()
    for stage, positions in enumerate(positions_by_stage(where)):
        chunks = tuple(ChunkBlocks(bounds[at], bounds[at + 1] - bounds[at]) for at in positions)
        is_first, is_last, tied_copy = stage == where[0], stage == where[-1], 0
        shape = StageShape(0, 0, chunks, is_first, is_last)
        experts = sum(expert_parameters(model, layer, tp) for layer in shape.layers)
        numbers = sum(block_parameters(model, layer, tp) for layer in shape.layers) - experts + experts // ep
        if is_first:
            numbers += embedding_parameters(model, tp)
            if model.position_embedding == "learned":
                numbers += model.max_position_embeddings * model.hidden_size
        if is_last:
            numbers += norm_parameters(model, model.hidden_size)
            if not model.tie_word_embeddings:
                numbers += embedding_parameters(model, tp)
            elif not is_first:  # on its embedding's stage it is the same weight
                tied_copy = embedding_parameters(model, tp)
        in_chunks = tuple(kinds[chunk.first : chunk.first + chunk.count] for chunk in chunks)
        like = first.setdefault((numbers, in_chunks, is_first, is_last, tied_copy), stage)
        count = Counter(kinds[layer] for layer in shape.layers)
        numbered = replace(shape, parameters=numbers, experts=experts // ep, tied_copy=tied_copy)
        shapes.append(replace(numbered, kinds=count, like=like))
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


def stages_of_job(job: TrainingWorkload) -> tuple[StageShape, ...]:
    """Returns the stages of a job, as its software stack divides the model."""
    layout = job.layout
    tp, pp, ep = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.expert_parallel_size
    if not job.stack.balances_stages:
        return even_stage_shapes(job.model, tp, pp, ep)
    return stage_shapes(job.model, tp, pp, layout.pipeline_schedule, layout.pipeline_chunks, ep)


def stages_of(config: Config, layout: ResolvedLayout) -> tuple[StageShape, ...]:
    """Returns the stages of a run."""
    tp, pp, ep = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.expert_parallel_size
    return stage_shapes(config.model, tp, pp, layout.pipeline_schedule, layout.pipeline_chunks, ep)


def recompute_of_blocks(config: Config, layout: ResolvedLayout) -> tuple[Recompute, ...]:
    """Returns what a run recomputes of each block: what the stage that holds it does."""
    shapes, modes = stages_of(config, layout), config.recompute.by_stage(layout.pipeline_parallel_size)
    of_block = {layer: mode for shape, mode in zip(shapes, modes, strict=True) for layer in shape.layers}
    return tuple(of_block[layer] for layer in range(config.model.num_hidden_layers))


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
    """Returns the parameters of projections, their biases, and the norms of queries and keys, or of latents."""
    numbers = 0
    for matrix in attention_matrices(model):
        inputs, outputs = matrix.sides(tp)
        numbers += outputs * (inputs + matrix.has_bias)
    if model.kv_lora_rank is not None:
        numbers += norm_parameters(model, model.kv_lora_rank + (model.q_lora_rank or 0))
    elif model.query_key_norm == "per_head":
        numbers += 2 * norm_parameters(model, model.head_dim)
    elif model.query_key_norm == "full_width":
        heads = model.num_attention_heads, model.num_key_value_heads
        numbers += sum(cut(count * model.head_dim, tp) for count in heads)
    return numbers


def feed_forward_parameters(model: ModelConfig, layer: int, tp: int) -> int:
    """Returns the parameters of the dense layer, or of router, experts and shared ones."""
    hidden = model.hidden_size
    if model.has_experts(layer):
        assert model.num_experts is not None
        shared = 3 * cut(model.shared_size, tp) * hidden
        return model.num_experts * hidden + shared + expert_parameters(model, layer, tp)
    features, matrices = cut(model.intermediate_size, tp), 3 if model.gated_mlp else 2
    biases = features * (matrices - 1) + hidden if model.mlp_bias else 0
    return matrices * features * hidden + biases


def expert_parameters(model: ModelConfig, layer: int, tp: int) -> int:
    """Returns the parameters of one rank's features of all experts of a block."""
    if not model.has_experts(layer):
        return 0
    assert model.num_experts is not None
    return model.num_experts * 3 * cut(model.moe_intermediate_size, tp) * model.hidden_size


def widest_parameter(model: ModelConfig, layer: int, tp: int, ep: int = 1) -> int:
    """Returns the numbers of a block's largest parameter: the feed-forward layer's first projections, of all experts
    of a rank together."""
    if model.has_experts(layer):
        return expert_parameters(model, layer, tp) * 2 // 3 // ep
    return cut(model.intermediate_size, tp) * model.hidden_size * (1 + model.gated_mlp)


def norm_parameters(model: ModelConfig, features: int) -> int:
    """Returns the parameters of a norm; LayerNorm has a bias beside its weight."""
    return features * (2 if model.normalization == "layernorm" else 1)


def scores_exist(model: ModelConfig) -> bool:
    """Returns whether torch's fused attention cannot be used (models/attention.py)."""
    return model.attention_dropout > 0 or model.attn_logit_softcapping is not None


def cut(size: int, tp: int) -> int:
    """Returns a rank's part of `size`, padding included."""
    return -(-size // tp)
