"""Bytes that each kind of parallelism moves in one optimizer step. Pure arithmetic, no torch.

In: a job and what each of its pipeline stages holds. Out: per stage what one rank hands to the collectives of its
groups, and from that what travels over each link.

Left out, because they vanish beside the rest in any model worth cutting: collectives of single numbers (losses, norms,
counts of tokens), of single weight vectors (norms under sequence parallelism) and of one number per token. What is here
is held against the collectives of real ranks by tests/ranks/megalite/planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megalite.config import ModelConfig
from megalite.parallel.mesh import attention_matrices
from megalite.planner.cost.model_states import dealt_experts, trained_numbers
from megalite.planner.cost.muon import gathered_over_replicas, gathered_over_tensor_ranks
from megalite.planner.cost.stage_parameters import StageShape, embedding_parameters, scores_exist
from megalite.planner.workload import BYTES, TrainingWorkload
from megalite.schedules.tables import placement
from megalite.units import Additive

INTEGER_BYTES = 8  # positions and sample numbers travel as int64
KEPT_BY_ZERO_3 = 1_000_000_000  # parameters; DeepSpeed's default of stage3_max_reuse_distance


@dataclass(frozen=True)
class Moved(Additive):
    """Bytes that one rank hands to the collectives of one group in one optimizer step."""

    all_reduce: int = 0  # of the tensor
    reduce_scatter: int = 0  # of what goes in
    all_gather: int = 0  # of what comes out
    all_to_all: int = 0  # of the tensor, an equal part of which goes to each rank
    broadcast: int = 0  # of the tensor
    send: int = 0  # of the tensor, which goes to one other rank

    def per_link(self, ranks: int) -> int:
        """Bytes that travel from each rank to the next one around a ring of `ranks`.

        Patarasuk & Yuan 2009 (JPDC 69): n bytes are reduce-scattered, or gathered, by (p-1)/p n from each
        rank, and no algorithm sends less; an all-reduce is the one and then the other. An all-to-all sends as much,
        straight to its rank. A broadcast or a send passes
        all n on.
        """
        if ranks == 1:
            return 0
        around = 2 * self.all_reduce + self.reduce_scatter + self.all_gather + self.all_to_all
        return around * (ranks - 1) // ranks + self.broadcast + self.send


@dataclass(frozen=True)
class Volumes:
    """Bytes per optimizer step of one rank of each stage."""

    tensor: tuple[Moved, ...]  # per stage, in its tensor-parallel group
    context: tuple[Moved, ...]  # per stage, in its context-parallel group
    data: tuple[Moved, ...]  # per stage, among the copies of its weights
    experts: tuple[Moved, ...]  # per stage, among the ranks that its experts are dealt over
    expert_data: tuple[Moved, ...]  # per stage, among the copies of an expert, if they are fewer
    stages: Mapping[tuple[int, int], int]  # from the first stage of a pair to the second: activations and gradients
    tied: Moved  # between the stages that hold a tied embedding and its head, if they are two


@dataclass(frozen=True)
class Traffic:
    """Bytes over each link in one optimizer step, which decide the placement of ranks."""

    tensor: tuple[int, ...]  # per stage: from each rank to the next one of its tensor-parallel ring
    data: tuple[int, ...]  # per stage: the same of the ring of its copies
    pipeline: Mapping[tuple[int, int], int]  # per pair of stages: between two ranks of them, both ways together
    tied: int  # between the first and the last stage's rank, both ways together
    context: tuple[int, ...] = ()  # per stage: from each rank to the next one of its context-parallel ring
    experts: tuple[int, ...] = ()  # per stage: the same of its expert-parallel ring
    expert_data: tuple[int, ...] = ()  # per stage: the same of the ring of an expert's copies


@dataclass(frozen=True)
class LayersMoved:
    """Bytes that one micro-batch moves within a group of ranks that share its layers."""

    forward: Moved
    backward: Moved
    again: Moved  # by recomputation
    beside: Moved = Moved()  # the part of `backward` that travels beside products

    @property
    def total(self) -> Moved:
        return self.forward + self.backward + self.again


def volumes(job: TrainingWorkload, stages: Sequence[StageShape]) -> Volumes:
    """Returns the bytes that one rank of each stage moves in one optimizer step, without evaluations and
    checkpoints."""
    count = job.micro_batches
    return Volumes(
        tensor=job.by_stage(
            lambda alike, those: [
                count * tensor_moved(alike, stage).total
                + Moved(all_gather=gathered_over_tensor_ranks(alike, stage), all_reduce=_summed_at_step(alike, stage))
                for stage in map(stages.__getitem__, those)
            ]
        ),
        context=job.by_stage(
            lambda alike, those: [count * context_moved(alike, stages[stage]).total for stage in those]
        ),
        data=tuple(data_moved(job, stage) for stage in stages),
        experts=job.by_stage(
            lambda alike, those: [count * experts_moved(alike, stages[stage]).total for stage in those]
        ),
        expert_data=tuple(expert_data_moved(job, stage) for stage in stages),
        stages=_pipeline(job),
        tied=tied_moved(job),
    )


def traffic(volumes: Volumes, job: TrainingWorkload) -> Traffic:
    """Returns the bytes over each link."""
    layout = job.layout
    tp, cp, dp, ep = (
        *(layout.tensor_parallel_size, layout.context_parallel_size, layout.replicas),
        layout.expert_parallel_size,
    )
    between: Counter[tuple[int, int]] = Counter()
    for (source, target), size in volumes.stages.items():
        between[min(source, target), max(source, target)] += size
    return Traffic(
        tensor=tuple(moved.per_link(tp) for moved in volumes.tensor),
        context=tuple(moved.per_link(cp) for moved in volumes.context),
        data=tuple(moved.per_link(dp) for moved in volumes.data),
        experts=tuple(moved.per_link(ep) for moved in volumes.experts),
        expert_data=tuple(moved.per_link(layout.expert_replicas) for moved in volumes.expert_data),
        pipeline=between,
        tied=volumes.tied.per_link(2),
    )


def hidden_state_bytes(job: TrainingWorkload) -> int:
    """Returns the bytes of one micro-batch's hidden states, not cut."""
    return job.micro_batch_tokens * job.model.hidden_size * BYTES[job.dtype]


def tensor_moved(job: TrainingWorkload, stage: StageShape) -> LayersMoved:
    """Shoeybi 2019 (Megatron-LM), section 3: a block all-reduces its hidden states twice forward (behind attention and
    behind the feed-forward layer) and twice backward, the embedding once forward, the head once backward.

    Under sequence parallelism each all-reduce is a reduce-scatter and an all-gather of the same bytes (Korthikanti
    2022, section 4.2.2). With full recomputation a block computes its forward once more, where that stops early up to
    the last number that backward needs: the sum at its end is done again only if a norm or dropout follows.

    Three things are ours. Column-parallel layers keep their slice of a cut sequence, so that backward gathers the whole
    once more, which Megatron-LM does too; experts and the head keep the whole. Key/value heads fewer than ranks are
    gathered as activations (docs/design.md). The loss exchanges two fp32 numbers per token instead of logits.
    """
    layout, model = job.layout, job.model
    tp = layout.tensor_parallel_size
    if tp == 1:
        return LayersMoved(Moved(), Moved(), Moved())
    size, blocks = hidden_state_bytes(job), stage.blocks
    kept = 0  # key/value features: an all-gather forward, a reduce-scatter backward
    if model.num_key_value_heads < tp:
        features = 2 * model.num_key_value_heads * model.head_dim
        kept = blocks * job.micro_batch_tokens * features * BYTES[job.dtype]
    loss = 2 * 4 * job.micro_batch_tokens * tp if stage.has_head else 0
    is_again = layout.recompute == "full"
    regions = 2 * blocks  # parallel ones, but for experts that the tokens of a cut sequence are sent to
    regions -= job.stack.folds_experts * sum(model.has_experts(layer) for layer in stage.layers)
    with_shared = (model.n_shared_experts > 0) * sum(model.has_experts(layer) for layer in stage.layers)
    regions += with_shared
    # the routed experts' sum is behind nothing that backward needs, but in front of the shared ones
    again = is_again * (regions if job.recomputes_the_end else blocks + with_shared) * size
    narrower = size - _entering_attention(model) * size // model.hidden_size
    # into a parallel region nothing forward and a sum backward, out of it a sum forward and nothing backward
    into_blocks, out_of = regions * size - blocks * narrower, (regions + stage.has_embedding) * size
    into = into_blocks + stage.has_head * size
    kept_again = is_again * kept
    # layers that enter by themselves, which latent attention's shared key does not
    linear = (with_shared + sum(1 if model.has_experts(layer) else 2 for layer in stage.layers)) * size
    linear -= blocks * (narrower + (model.qk_rope_head_dim or 0) * size // model.hidden_size)
    linear *= job.stack.has_own_linear_layers * (not job.trains_adapters)  # which have no product to go beside
    if layout.sequence_parallel:  # the nothings are all-gathers, and each sum leaves its result cut
        return LayersMoved(
            forward=Moved(reduce_scatter=out_of, all_gather=into + kept + loss),
            backward=Moved(reduce_scatter=into + kept, all_gather=out_of + linear),
            again=Moved(reduce_scatter=again, all_gather=is_again * into_blocks + kept_again),
            beside=Moved(reduce_scatter=linear, all_gather=linear),
        )
    return LayersMoved(
        forward=Moved(all_reduce=out_of, all_gather=kept + loss),
        backward=Moved(all_reduce=into, reduce_scatter=kept),
        again=Moved(all_reduce=again, all_gather=kept_again),
        beside=Moved(all_reduce=linear),
    )


def _summed_at_step(job: TrainingWorkload, stage: StageShape) -> int:
    """Returns the bytes of fp32 gradients of matrices that are not cut, of which each rank has a part where sequences
    are; once a step, of what a replica owns."""
    layout = job.layout
    if layout.tensor_parallel_size == 1 or not layout.sequence_parallel or job.trains_adapters:
        return 0
    whole = sum(each.inputs * each.outputs for each in attention_matrices(job.model) if each.cut == "none")
    return 4 * whole * stage.blocks // layout.replicas


def _entering_attention(model: ModelConfig) -> int:
    """Returns the features of a token that enter attention's parallel region: hidden states, or its latents."""
    if model.kv_lora_rank is None:
        return model.hidden_size
    return (model.q_lora_rank or model.hidden_size) + model.kv_lora_rank + (model.qk_rope_head_dim or 0)


def context_moved(job: TrainingWorkload, stage: StageShape) -> LayersMoved:
    """Liu 2023 and Dubey 2024, section 3.3.2: keys and values of all tokens are gathered forward, and what the ranks'
    queries contribute to their gradients is reduce-scattered backward. Jacobs 2023 (Ulysses) exchanges queries, keys,
    values and contexts both ways, with key/value heads repeated for ranks that outnumber them."""
    layout, model = job.layout, job.model
    cp, tp = layout.context_parallel_size, layout.tensor_parallel_size
    if cp == 1:
        return LayersMoved(Moved(), Moved(), Moved())
    heads, kv = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
    of_heads = stage.blocks * job.micro_batch_tokens * model.head_dim * BYTES[job.dtype]
    is_selective = layout.recompute == "selective" and scores_exist(model)
    if layout.context_parallel_kind == "ulysses":
        there = back = Moved(all_to_all=of_heads * 2 * (heads + max(kv, cp)))
        again = Moved(all_to_all=of_heads * (heads + 2 * max(kv, cp))) if is_selective else there
    else:
        there, back = Moved(all_gather=of_heads * cp * 2 * kv), Moved(reduce_scatter=of_heads * cp * 2 * kv)
        again = there
    return LayersMoved(there, back, again if is_selective or layout.recompute == "full" else Moved())


def experts_moved(job: TrainingWorkload, stage: StageShape) -> LayersMoved:
    """Lepikhin 2020 (GShard), section 3.2: every token's hidden states go to the ranks of its experts and come back
    forward, and their gradients backward. What a rank gets is taken to be as much as it sends. Recomputation of the
    whole block exchanges both again, because the weights of experts' outputs have gradients of them."""
    layout, model = job.layout, job.model
    if layout.expert_parallel_size == 1:
        return LayersMoved(Moved(), Moved(), Moved())
    layers = sum(model.has_experts(layer) for layer in stage.layers)
    size = hidden_state_bytes(job) // (layout.tensor_parallel_size if job.stack.folds_experts else 1)
    there = Moved(all_to_all=2 * layers * model.num_experts_per_tok * size)
    return LayersMoved(there, there, there if layout.recompute == "full" else Moved())


def data_moved(job: TrainingWorkload, stage: StageShape) -> Moved:
    """Returns the bytes of the weights that all replicas hold; Muon gathers its updates besides."""
    moved = _copies_moved(job, trained_numbers(job, stage) - dealt_experts(job, stage), job.layout.replicas, stage)
    return moved + Moved(all_gather=gathered_over_replicas(job, stage))


def expert_data_moved(job: TrainingWorkload, stage: StageShape) -> Moved:
    """Returns the same of experts that are dealt over replicas."""
    return _copies_moved(job, dealt_experts(job, stage), job.layout.expert_replicas, stage)


def _copies_moved(job: TrainingWorkload, trained: int, copies: int, stage: StageShape) -> Moved:
    """Rajbhandari 2020 (ZeRO), section 7: gradients are reduce-scattered and weights gathered once each, and under
    stage 3 weights are gathered before every use. That is stage 1, and stage 2 with a reduce-scatter for every
    micro-batch (engine/reduction). Codes of gradients go straight to their owner (engine/compression).

    Stage 3, in DeepSpeed 0.19, reduce-scatters for every micro-batch, and keeps the weights from forward to backward of
    a model that has fewer numbers than `stage3_max_reuse_distance`, but not in a pipeline. There each pass hands over
    its own chunk's gradients, with split backward in two parts: more collectives, of the same bytes in sum.

    PyTorch's FSDP (Zhao 2023) gathers them for both, or once, where gradients and optimizer alone are sharded.
    """
    layout, stack, count = job.layout, job.stack, job.micro_batches
    if copies == 1 or not trained:
        return Moved()
    weights, gradients = trained * BYTES[job.dtype], trained * BYTES[job.reduction_dtype]
    if stack.replicas == "all_reduce":
        return Moved(all_reduce=gradients)
    if job.reduces_beside_backward or stack.replicas == "sharded_optimizer":
        is_coded = job.compression.gradients != "none"
        told, weights = (round(trained * each) for each in (job.bytes_per_gradient, job.bytes_per_weight))
        told *= job.reductions
        return Moved(reduce_scatter=told * (not is_coded), all_to_all=told * is_coded, all_gather=weights)
    if stack.replicas == "fully_sharded" and layout.zero_stage < 3:
        return Moved(reduce_scatter=count * gradients, all_gather=count * weights)
    if layout.zero_stage == 3:
        is_kept = stage.parameters <= KEPT_BY_ZERO_3 and layout.pipeline_parallel_size == 1
        uses = 1 if is_kept and stack.replicas == "deepspeed" else 2
        return Moved(reduce_scatter=count * gradients, all_gather=count * uses * weights)
    return Moved(all_reduce=gradients, all_gather=weights)


def _pipeline(job: TrainingWorkload) -> Mapping[tuple[int, int], int]:
    """Narayanan 2021 (SC21), section 3.2: hidden states of every micro-batch forward and their gradients backward, over
    every boundary between chunks of different stages. Without sequence parallelism every tensor-parallel rank sends all
    of them, unless the stack cuts them.

    Positions ride along where documents are masked, sample numbers where dropout is on.
    """
    layout = job.layout
    hidden, count = hidden_state_bytes(job), job.micro_batches
    if layout.sequence_parallel or job.stack.cuts_boundary_tensors:
        hidden //= layout.tensor_parallel_size
    riders = INTEGER_BYTES * layout.micro_batch_size * job.sequence_length if job.document_mask else 0
    riders += INTEGER_BYTES * layout.micro_batch_size if job.model.has_dropout else 0
    sent: Counter[tuple[int, int]] = Counter()
    for source, target in pairwise(placement(layout.schedule, layout.pipeline_parallel_size, layout.pipeline_chunks)):
        if source != target:
            sent[source, target] += count * (hidden + -(-riders // 16) * 16)  # hidden states begin at 16 bytes
            sent[target, source] += count * hidden
    return sent


def tied_moved(job: TrainingWorkload) -> Moved:
    """Returns the bytes for a tied embedding: the head's stage sends its gradient in fp32 and gets the weight back,
    unless it holds both."""
    layout = job.layout
    where = placement(layout.schedule, layout.pipeline_parallel_size, layout.pipeline_chunks)
    if where[0] == where[-1] or not job.model.tie_word_embeddings or job.trains_adapters:
        return Moved()
    numbers = embedding_parameters(job.model, layout.tensor_parallel_size)
    return Moved(broadcast=numbers * BYTES[job.dtype], send=numbers * 4)
