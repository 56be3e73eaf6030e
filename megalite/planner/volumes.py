"""Bytes that each kind of parallelism moves in one optimizer step. Pure arithmetic, no torch.

In: a config, its layout, and what each pipeline stage holds (derived from the layer specs by whoever calls). Out: per
stage what one rank hands to the collectives of its groups, and from that what travels over each link.

Left out, because they vanish beside the rest in any model worth cutting: collectives of single numbers (losses, norms,
counts of tokens), of single weight vectors (norms under sequence parallelism) and of one number per token. What is here
is held against the collectives of real ranks by tests/planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config import Config, ResolvedLayout
from megalite.config.precision import Dtype

BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
INTEGER_BYTES = 8  # positions and sample numbers travel as int64
KEPT_BY_ZERO_3 = 1_000_000_000  # parameters; DeepSpeed's default of stage3_max_reuse_distance


@dataclass(frozen=True)
class StageShape:
    """What one tensor-parallel rank of a pipeline stage holds."""

    parameters: int  # numbers, before ZeRO cuts them, padding included
    blocks: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Moved:
    """Bytes that one rank hands to the collectives of one group in one optimizer step."""

    all_reduce: int = 0  # of the tensor
    reduce_scatter: int = 0  # of what goes in
    all_gather: int = 0  # of what comes out
    broadcast: int = 0  # of the tensor

    def per_link(self, ranks: int) -> int:
        """Bytes that travel from each rank to the next one around a ring of `ranks`.

        Patarasuk & Yuan 2009 (JPDC 69), section 3: n bytes are reduce-scattered, or gathered, by (p-1)/p n from each
        rank, and no algorithm sends less; an all-reduce is the one and then the other. A broadcast passes all n on.
        """
        if ranks == 1:
            return 0
        around = 2 * self.all_reduce + self.reduce_scatter + self.all_gather
        return around * (ranks - 1) // ranks + self.broadcast


@dataclass(frozen=True)
class Volumes:
    """Per optimizer step, of one rank of each stage."""

    tensor: tuple[Moved, ...]  # per stage, in its tensor-parallel group
    data: tuple[Moved, ...]  # per stage, in its data-parallel group
    activations: tuple[int, ...]  # per boundary between stages, to the next stage
    gradients: tuple[int, ...]  # per boundary, back
    tied: Moved  # between the first and the last stage, which both hold a tied embedding


@dataclass(frozen=True)
class Traffic:
    """Bytes over each link in one optimizer step: what decides where ranks should sit."""

    tensor: tuple[int, ...]  # per stage: from each rank to the next one of its tensor-parallel ring
    data: tuple[int, ...]  # per stage: the same of its data-parallel ring
    pipeline: tuple[int, ...]  # per boundary: between the two ranks that face each other, both ways together
    tied: int  # between the first and the last stage's rank, both ways together


def volumes(config: Config, layout: ResolvedLayout, stages: Sequence[StageShape]) -> Volumes:
    """What one rank of each stage moves in one optimizer step, evaluations and checkpoints left out."""
    activations, gradients = _pipeline(config, layout)
    boundaries = len(stages) - 1
    return Volumes(
        tensor=tuple(_tensor(config, layout, stage) for stage in stages),
        data=tuple(_data(config, layout, stage) for stage in stages),
        activations=(activations,) * boundaries,
        gradients=(gradients,) * boundaries,
        tied=_tied(config, layout),
    )


def traffic(volumes: Volumes, layout: ResolvedLayout) -> Traffic:
    """The same per link."""
    tp, dp = layout.tensor_parallel_size, layout.data_parallel_size
    return Traffic(
        tensor=tuple(moved.per_link(tp) for moved in volumes.tensor),
        data=tuple(moved.per_link(dp) for moved in volumes.data),
        pipeline=tuple(there + back for there, back in zip(volumes.activations, volumes.gradients, strict=True)),
        tied=2 * volumes.tied.per_link(2),  # a ring of two has a link each way
    )


def _hidden_states(config: Config) -> int:
    """Bytes of one micro-batch's hidden states, whole."""
    return _tokens(config) * config.model.hidden_size * BYTES[config.precision.dtype]


def _tokens(config: Config) -> int:
    return config.training.micro_batch_size * config.training.sequence_length


def _tensor(config: Config, layout: ResolvedLayout, stage: StageShape) -> Moved:
    """Shoeybi 2019 (Megatron-LM), section 3: a block all-reduces its hidden states twice forward (behind attention and
    behind the feed-forward layer) and twice backward, the embedding once forward, the head once backward.

    Under sequence parallelism each all-reduce is a reduce-scatter and an all-gather of the same bytes (Korthikanti
    2022, section 4.2.2). With full recomputation a block computes its forward once more, up to the last number that
    backward needs: the sum at its end is done again only if a norm or dropout follows.

    Two things are ours. Key/value heads fewer than ranks are gathered as activations (docs/design.md). The loss
    exchanges two fp32 numbers per token instead of logits.
    """
    tp, model = layout.tensor_parallel_size, config.model
    if tp == 1:
        return Moved()
    recomputes = int(config.recompute.mode == "full")
    is_needed_at_end = model.norm_placement != "pre" or model.residual_dropout > 0
    sums_again = recomputes * stage.blocks * (2 if is_needed_at_end else 1)
    gathered = 0  # key/value features: an all-gather forward, a reduce-scatter backward
    if model.num_key_value_heads < tp:
        features = 2 * model.num_key_value_heads * model.head_dim
        gathered = stage.blocks * _tokens(config) * features * BYTES[config.precision.dtype]
    loss = 2 * 4 * _tokens(config) * tp if stage.has_head else 0
    # into a parallel region nothing forward and a sum backward, out of it a sum forward and nothing backward
    into, out_of = 2 * stage.blocks + stage.has_head, 2 * stage.blocks + stage.has_embedding
    size, count = _hidden_states(config), layout.gradient_accumulation_steps
    sums = (into + out_of + sums_again) * size
    gathers = (1 + recomputes) * gathered + loss
    if config.parallel.sequence_parallel:  # the nothings are all-gathers, and each sum leaves its result cut
        again = recomputes * 2 * stage.blocks
        return Moved(
            reduce_scatter=count * (sums + gathered), all_gather=count * ((into + out_of + again) * size + gathers)
        )
    return Moved(all_reduce=count * sums, reduce_scatter=count * gathered, all_gather=count * gathers)


def _data(config: Config, layout: ResolvedLayout, stage: StageShape) -> Moved:
    """Rajbhandari 2020 (ZeRO), section 7: gradients are reduce-scattered and weights gathered once each, and under
    stage 3 weights are gathered before every use. DeepSpeed 0.19 differs, and this is what it does:

    stages 1 and 2 all-reduce gradients, which is twice a reduce-scatter (`use_multi_rank_bucket_allreduce`,
    runtime/zero/stage_1_and_2.py); stage 2 does so for every micro-batch; stage 3 reduce-scatters for every
    micro-batch, and keeps the weights from forward to backward of a model that has fewer numbers than
    `stage3_max_reuse_distance`.
    """
    if layout.data_parallel_size == 1:
        return Moved()
    size, count = stage.parameters * BYTES[config.precision.dtype], layout.gradient_accumulation_steps
    if layout.zero_stage == 3:
        uses = 1 if stage.parameters <= KEPT_BY_ZERO_3 else 2
        return Moved(reduce_scatter=count * size, all_gather=count * uses * size)
    return Moved(all_reduce=(count if layout.zero_stage == 2 else 1) * size, all_gather=size)


def _pipeline(config: Config, layout: ResolvedLayout) -> tuple[int, int]:
    """Narayanan 2021 (SC21), section 3.2: hidden states of every micro-batch forward and their gradients backward.
    Without sequence parallelism every tensor-parallel rank sends all of them (no scatter/gather optimisation, section
    4.1).

    Positions ride along where documents are masked, sample numbers where dropout is on.
    """
    if layout.pipeline_parallel_size == 1:
        return 0, 0
    hidden, count = _hidden_states(config), layout.gradient_accumulation_steps
    if config.parallel.sequence_parallel:
        hidden //= layout.tensor_parallel_size
    riders = INTEGER_BYTES * _tokens(config) if config.data.document_mask else 0
    riders += INTEGER_BYTES * config.training.micro_batch_size if config.model.has_dropout else 0
    return count * (hidden + riders), count * hidden


def _tied(config: Config, layout: ResolvedLayout) -> Moved:
    """The gradients of both copies are summed, then the first stage's weight is everybody's (megalite/engine)."""
    if layout.pipeline_parallel_size == 1 or not config.model.tie_word_embeddings:
        return Moved()
    tp, model, precision = layout.tensor_parallel_size, config.model, config.precision
    numbers = -(-model.vocab_size // tp) * model.hidden_size
    return Moved(
        all_reduce=numbers * BYTES[precision.gradient_accumulation_dtype],
        broadcast=numbers * BYTES[precision.dtype],
    )
