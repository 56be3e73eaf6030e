"""Duration of one optimizer step, part by part. Pure arithmetic, no torch.

The slowest stage sets the pace of a pipeline; before and after it is full, the others wait (Narayanan 2021, section
2.2). What each part is made of: layer_time.py, communication_time.py, communication_volumes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megalite.config import ModelConfig
from megalite.config.rules.pipeline import SPLITS_BACKWARD
from megalite.planner.cost.activations import BlockWorkload, chunk_bytes
from megalite.planner.cost.communication_time import (
    boundary_s,
    context_ring,
    data_ring,
    end_ring,
    expert_data_ring,
    expert_ring,
    tensor_ring,
)
from megalite.planner.cost.communication_volumes import (
    Moved,
    context_moved,
    data_moved,
    expert_data_moved,
    experts_moved,
    hidden_state_bytes,
    tensor_moved,
    tied_moved,
)
from megalite.planner.cost.layer_time import (
    LayerTime,
    Passes,
    Speed,
    block_work,
    dense_flops,
    head_flops,
    head_work,
    products_of_backward,
    score_flops,
)
from megalite.planner.cost.model_states import dealt_experts, owned_numbers, trained_numbers
from megalite.planner.cost.muon import gathered_over_replicas, gathered_over_tensor_ranks, orthogonalizing_flops
from megalite.planner.cost.offloading import exposed_copies_s, host_update_s
from megalite.planner.cost.overlapped_reduction import gathers_wait_s, reduction_ends_s
from megalite.planner.cost.stage_parameters import StageShape, block_kinds, stages_of_job
from megalite.planner.hardware import Cluster
from megalite.planner.workload import BYTES, ParallelLayout, TrainingWorkload
from megalite.schedules.simulation import LastGradients, PipelineTimes, idle_of_equal_stages, last_gradients
from megalite.units import Additive

# AdamW reads weight, gradient and both moments, and writes all but the gradient; Muon has one moment and an update of
# 16 bits, which it writes and reads
OPTIMIZER_BYTES = {"adamw": 12, "muon": 16, "sgd": 12}  # per parameter, without moments
MOMENTS_MOVED = {"adamw": 4, "muon": 2, "sgd": 0}  # numbers per parameter
# times the launch of a kernel, where each is waited for: BLOOM's first day; its second day is held against it
WAITED_LAUNCHES = 4.0
# times the host's work for a block where DeepSpeed does not reduce: 0.19.8's hooks, in CPU time of a tiny micro-batch
ZERO_3_HOST_WORK = 4.4
# the host's work for a block with experts, in such of a dense one, in CPU time, and in a loop that of each expert more
EXPERTS_HOST_WORK, EXPERT_HOST_WORK = 2.0, 0.1
DIGITS = 1000  # parts of a micro-batch's time to which simulated pipelines are exact


@dataclass(frozen=True)
class StageTime(Additive):
    """Times of one micro-batch on one pipeline stage, in seconds."""

    forward_s: float
    backward_s: float  # recomputation included
    work: LayerTime  # forward, backward and recomputation together, by what bounds it
    tensor_s: float  # that communication in the tensor-parallel group adds
    context_s: float  # the exposed part of attention's communication between ranks that share sequences
    experts_s: float  # that exchanging tokens between ranks with other experts adds
    tensor_links_s: float  # that it uses the links for, whether or not computation goes on meanwhile
    launch_s: float
    weight_gradient_s: float  # the part of backward that a schedule may postpone: products of the blocks' weights

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one optimizer step."""

    parts: Mapping[str, float]  # what it goes into -> seconds, adding up to the total
    stages: tuple[StageTime, ...]
    between_stages_s: float  # for one tensor across one boundary
    model_flops: float  # of the whole step: what the mathematics needs, without recomputation
    peak_flops: float | None  # of all accelerators, per second; None for a CPU, whose peak is measured, not specified
    hidden_s: float = 0.0  # exchanges between replicas that are taken to run behind computation

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def model_flops_utilization(self) -> float | None:
        """MFU (Chowdhery 2022, appendix B), with scores above the diagonal counted as there; None without a peak."""
        return None if self.peak_flops is None else self.model_flops / self.seconds / self.peak_flops


def step_time(job: TrainingWorkload, cluster: Cluster) -> StepTime:
    """Predicts a step on as many accelerators of `cluster` as the layout uses. Raises ConfigError for a dtype
    without peak."""
    layout = job.layout
    speed = Speed.of(job, cluster)
    shapes = stages_of_job(job)
    stages = job.by_stage(lambda alike, those: _stages(alike, [shapes[stage] for stage in those], cluster, speed))
    mean, slowest = 1 / len(stages) * StageTime.sum(stages), max(stage.seconds for stage in stages)
    count, between = job.micro_batches, _between_s(job, cluster)
    bubble_s, messages_s = _pipeline_s(job, mean, between)
    largest = max(shapes, key=lambda shape: shape.parameters)
    owned = trained_numbers(job, largest) if job.stack.replicas == "all_reduce" else owned_numbers(job, largest)
    if job.reduces_beside_backward and cluster.accelerator.device != "cpu":  # whose cores compute and communicate
        exposed = _beside_backward_s(job, cluster, shapes, mean, between)
    else:
        exposed = _replicas_s(job, cluster, largest, stages[shapes.index(largest)])
    parts = {
        "matrix products": count * mean.work.matrix_s,
        "attention": count * mean.work.attention_s,
        "memory-bound": count * mean.work.memory_s,
        "tensor collectives": count * mean.tensor_s,
        "context collectives": count * mean.context_s,
        "expert collectives": count * mean.experts_s,
        "launches": count * mean.launch_s,
        "stage imbalance": count * (slowest - mean.seconds),
        "pipeline bubble": _idle(layout.pipeline_parallel_size, cluster) * bubble_s,
        "between stages": messages_s + end_ring(layout, cluster).seconds(tied_moved(job)),
        "replicas": exposed,
        "optimizer": _optimizer_s(job, cluster, owned, speed)
        + orthogonalizing_flops(job, largest) / speed.flops
        + tensor_ring(layout, cluster).seconds(Moved(all_gather=gathered_over_tensor_ranks(job, largest))),
        "offloading": count
        * max(
            job.by_stage(
                lambda alike, those: [_offloading_s(alike, cluster, speed, shapes[at], stages[at]) for at in those]
            )
        )
        if job.offloads_activations
        else 0.0,
    }
    dense = sum(kinds * dense_flops(job, layer) for layer, kinds in Counter(block_kinds(job.model)).items())
    scores = sum(kinds * score_flops(job, layer) for layer, kinds in Counter(block_kinds(job.model)).items())
    forward_flops = dense + head_flops(job) + scores  # of one micro-batch
    return StepTime(
        parts=parts,
        stages=stages,
        between_stages_s=between,
        # forward and what backward has for it, of all micro-batches and replicas
        model_flops=(1.0 + products_of_backward(job)) * (forward_flops * count * layout.replicas),
        peak_flops=None if cluster.accelerator.device == "cpu" else cluster.peak_flops(job.dtype) * layout.world_size,
        hidden_s=max(0.0, _copies_s(job, cluster, largest) - exposed),
    )


def _optimizer_s(job: TrainingWorkload, cluster: Cluster, owned: float, speed: Speed) -> float:
    """Returns the seconds of the update of as many parameters as a rank owns."""
    update_bytes = OPTIMIZER_BYTES[job.optimizer] + MOMENTS_MOVED[job.optimizer] * BYTES[job.moments_dtype]
    if job.offloads_optimizer and cluster.accelerator.device == "cuda":
        return host_update_s(job, cluster, owned, update_bytes)
    return update_bytes * owned / speed.memory_bytes


def _offloading_s(job: TrainingWorkload, cluster: Cluster, speed: Speed, shape: StageShape, stage: StageTime) -> float:
    """Returns the seconds that moving activations adds to a micro-batch on one stage."""
    blocks = BlockWorkload.of(job)
    kept = sum(chunk_bytes(blocks, each.first, each.count, widens=False).kept for each in shape.chunks)
    return exposed_copies_s(cluster, kept, (stage.forward_s, stage.backward_s), speed.memory_bytes)


def _pipeline_s(job: TrainingWorkload, mean: StageTime, between_s: float) -> tuple[float, float]:
    """Returns the seconds in which equal stages wait for the pipeline to fill and to empty, and for messages while it
    is full. Where stages wait for messages, Narayanan 2021, section 2.2; else from the simulated table."""
    layout, count = job.layout, job.micro_batches
    p, v = layout.pipeline_parallel_size, layout.pipeline_chunks
    if job.stack.waits_for_messages or p == 1:
        return (p - 1) / v * (mean.seconds + 2 * v * between_s), count * 2 * v * between_s
    unit, times = _rounded(mean, between_s, layout)
    bubble = (p - 1) / v * DIGITS  # of 1F1B, also interleaved
    if layout.schedule in SPLITS_BACKWARD:
        bubble = idle_of_equal_stages(layout.schedule, replace(times, between_stages_s=0.0), count, v)
    return unit * bubble, unit * (idle_of_equal_stages(layout.schedule, times, count, v) - bubble)


def _rounded(mean: StageTime, between_s: float, layout: ParallelLayout) -> tuple[float, PipelineTimes]:
    """Returns a unit of time, and in it the times of equal stages, so that alike jobs share one simulation."""
    unit, stages = mean.seconds / DIGITS, layout.pipeline_parallel_size
    weight_s = mean.weight_gradient_s if layout.schedule in SPLITS_BACKWARD else 0.0  # else no pass takes it by itself
    forward, weight, travel = (round(s / unit) for s in (mean.forward_s, weight_s, between_s))
    return unit, PipelineTimes((forward,) * stages, (DIGITS - forward,) * stages, travel, (weight,) * stages)


def _idle(stages: int, cluster: Cluster) -> float:
    """Returns the part of the bubble in which cores idle.

    A rank of n on C cores computes with C/n of them. While others wait, with more: with p stages it takes n = p C ranks
    until those of a single stage keep all cores busy, and nothing of the bubble is idle then; with n <= C all is.
    """
    if cluster.ranks_per_core <= 1 or stages == 1:
        return 1.0
    return min(1.0, max(0.0, stages / cluster.ranks_per_core - 1) / (stages - 1))


def _stages(job: TrainingWorkload, shapes: Sequence[StageShape], cluster: Cluster, speed: Speed) -> list[StageTime]:
    by_kind = {kind: block_work(job, kind, speed) for kind in set(block_kinds(job.model))}
    head = head_work(job, speed)
    kinds = {shape.like: shape for shape in shapes}
    found = {like: _stage(job, shape, cluster, speed, by_kind, head) for like, shape in kinds.items()}
    return [found[shape.like] for shape in shapes]


def _stage(
    job: TrainingWorkload,
    shape: StageShape,
    cluster: Cluster,
    speed: Speed,
    by_kind: Mapping[int, Passes],
    head: Passes,
) -> StageTime:
    first, *others = (count * by_kind[kind] for kind, count in shape.kinds.items())
    of_blocks = sum(others, first)
    passes = of_blocks + head if shape.has_head else of_blocks
    ring, moved, kinds = tensor_ring(job.layout, cluster), tensor_moved(job, shape), 2 * shape.blocks
    there, back = ring.seconds(moved.forward, kinds), ring.seconds(moved.backward, kinds)
    again = ring.seconds(moved.again, kinds)
    links_s = there + back + again
    if job.stack.overlaps_tensor_gradients:  # behind the products that make gradients of weights
        back = max(0.0, back - passes.backward.matrix_s / 2)
    elif cluster.accelerator.device != "cpu":  # gloo takes the cores that compute
        # a gather travels beside the products for gradients of inputs, a sum beside those of weights, if they follow
        product_s, beside = of_blocks.backward.matrix_s / 2, moved.beside
        sums = Moved(all_reduce=beside.all_reduce, reduce_scatter=beside.reduce_scatter)
        back -= min(ring.seconds(Moved(all_gather=beside.all_gather), kinds), product_s)
        back -= 0.0 if job.layout.schedule in SPLITS_BACKWARD else min(ring.seconds(sums, kinds), product_s)
    shared, around = context_moved(job, shape), context_ring(job.layout, cluster)
    context = [around.seconds(each, shape.blocks) for each in (shared.forward, shared.backward, shared.again)]
    dealt, among = experts_moved(job, shape), expert_ring(job, cluster)
    calls = 2 * sum(job.model.has_experts(kind) * count for kind, count in shape.kinds.items())
    experts = [among.seconds(each, calls) for each in (dealt.forward, dealt.backward, dealt.again)]
    forward = passes.forward.seconds + there + context[0] + experts[0]
    backward = passes.backward.seconds + back + context[1] + experts[1]
    recomputed = passes.again.seconds + again + context[2] + experts[2]
    is_deepspeeds = job.stack.replicas == "deepspeed" and not job.reduces_beside_backward
    host = ZERO_3_HOST_WORK if is_deepspeeds else 1.0
    loops = cluster.accelerator.device == "cpu" or job.dtype != "bf16"  # over experts
    blocks = sum(_host_blocks(job.model, kind, loops=loops) * count for kind, count in shape.kinds.items())
    launch = [blocks * speed.launch_s * host * factor for factor in (1, 2, job.layout.recompute == "full")]
    waits = job.stack.waits_for_launches or cluster.accelerator.device == "cpu"
    launch_s = [
        pause * (WAITED_LAUNCHES if job.stack.waits_for_launches else 1) if waits else max(0.0, pause - busy)
        for pause, busy in zip(launch, (forward, backward, recomputed), strict=True)
    ]
    return StageTime(
        forward_s=forward + launch_s[0],
        backward_s=backward + recomputed + launch_s[1] + launch_s[2],
        work=passes.forward + passes.backward + passes.again,
        tensor_s=there + back + again,
        context_s=sum(context),
        experts_s=sum(experts),
        tensor_links_s=links_s,
        launch_s=sum(launch_s),
        weight_gradient_s=of_blocks.backward.matrix_s * (1.0 - 1.0 / products_of_backward(job)),
    )


def _host_blocks(model: ModelConfig, layer: int, *, loops: bool) -> float:
    """Returns the number of dense blocks whose launch takes the host equally long (parallel/grouped_linear.py)."""
    if not model.has_experts(layer):
        return 1.0
    assert model.num_experts is not None
    return EXPERTS_HOST_WORK + (EXPERT_HOST_WORK * model.num_experts if loops else 0.0)


def _between_s(job: TrainingWorkload, cluster: Cluster) -> float:
    """Returns the seconds of sending one tensor to the next stage."""
    layout, whole = job.layout, hidden_state_bytes(job)
    if layout.pipeline_parallel_size == 1:
        return 0.0
    if layout.sequence_parallel:
        return boundary_s(whole / layout.tensor_parallel_size, 0, layout, cluster)
    if job.stack.cuts_boundary_tensors:
        return boundary_s(whole / layout.tensor_parallel_size, whole, layout, cluster)
    return boundary_s(whole, 0, layout, cluster)


def _replicas_s(job: TrainingWorkload, cluster: Cluster, largest: StageShape, stage: StageTime) -> float:
    """Returns the seconds that communication between replicas adds: all of it, or the part that is not overlapped."""
    if job.layout.replicas == 1:
        return 0.0
    if job.layout.zero_stage == 3 or job.stack.replicas == "fully_sharded":
        return job.micro_batches * _exposed_when_sharded_s(job, largest, stage, cluster)
    gathering = _copies_s(job, cluster, largest, "all_gather")
    reducing = _copies_s(job, cluster, largest, "all_reduce", "reduce_scatter", collectives=job.reductions)
    if job.stack.overlaps_replicas:
        return _late(reducing, stage.backward_s, largest.blocks) + _late(gathering, stage.forward_s, largest.blocks)
    return reducing + gathering


def _copies_s(
    job: TrainingWorkload, cluster: Cluster, shape: StageShape, *kinds: str, collectives: int = 1, parts: int = 1
) -> float:
    """Returns the seconds of communication between the copies of a stage's weights and of its dealt experts: of some
    kinds of collectives or all, of one of so many equal parts of a step."""
    total = 0.0
    for ring, moved in (
        (data_ring(job.layout, cluster), data_moved(job, shape)),
        (expert_data_ring(job.layout, cluster), expert_data_moved(job, shape)),
    ):
        each = vars(moved).items()
        of_kinds = {kind: size // parts for kind, size in each if kind in kinds or not kinds}
        total += ring.seconds(Moved(**of_kinds), collectives)
    return total


def _beside_backward_s(
    job: TrainingWorkload, cluster: Cluster, shapes: Sequence[StageShape], mean: StageTime, between_s: float
) -> float:
    """Returns the seconds that replicas add where gradients are reduced beside backward: until the last stage has
    reduced its own, and for new weights of which the next forward has to wait (engine/reduction/weight_gathers.py)."""
    layout = job.layout
    ring, _ = rings = data_ring(layout, cluster), expert_data_ring(layout, cluster)
    if ring.ranks == 1:
        return 0.0
    v = layout.pipeline_chunks
    unit, times = _rounded(mean, between_s, layout)
    others_s = mean.tensor_links_s / v if tensor_ring(layout, cluster).leaves_node == ring.leaves_node else 0.0
    others_s += between_s if (layout.world_size > cluster.accelerators_per_node) == ring.leaves_node else 0.0
    ends_s = []
    for shape, passes in zip(shapes, last_gradients(layout.schedule, times, job.micro_batches, v), strict=True):
        last = [LastGradients(unit * begin, unit * end) for begin, end in passes]
        ends_s.append(reduction_ends_s(job, shape, rings, last, others_s))
    kinds = {shape.like: shape for shape in shapes}.values()
    waited_s = max(
        gathers_wait_s(job, shape, rings, mean.forward_s)
        + ring.seconds(Moved(all_gather=gathered_over_replicas(job, shape)))  # Muon's, in the optimizer
        for shape in kinds
    )
    # earlier rounds of ZeRO-2 are beside the backward of the micro-batch behind them
    round_s = max(_copies_s(job, cluster, shape, "reduce_scatter", parts=job.reductions) for shape in kinds)
    late_s = (job.reductions - 1) * max(0.0, round_s - mean.backward_s)
    return max(0.0, *ends_s) + late_s + waited_s


def _late(communication_s: float, computation_s: float, blocks: int) -> float:
    """Returns the seconds that computation cannot hide: at least one layer's communication, and the excess over
    computing."""
    return max(communication_s / (blocks + 1), communication_s - computation_s)


def _exposed_when_sharded_s(job: TrainingWorkload, shape: StageShape, stage: StageTime, cluster: Cluster) -> float:
    """Returns the exposed seconds of one micro-batch. Weights of a layer are gathered while the one before is
    computed, and gradients are scattered while the next one's are (Rajbhandari 2020; Zhao 2023, section 3.3): the
    first gather and the last scatter of a pass have nothing to hide behind, nor what takes longer than computing."""
    count, blocks = job.micro_batches, shape.blocks
    gathered = _copies_s(job, cluster, shape, "all_gather", collectives=blocks, parts=count)
    scattered = _copies_s(job, cluster, shape, "reduce_scatter", collectives=blocks, parts=count)
    # gloo's threads take the cores that compute, and in a pipeline ZeRO-3 cannot foresee which weights come next
    if cluster.accelerator.device == "cpu" or job.layout.pipeline_parallel_size > 1:
        return gathered + scattered
    whole = (shape.parameters - dealt_experts(job, shape)) * BYTES[job.dtype]
    uses = round(data_moved(job, shape).all_gather / count / whole)
    forward, again = gathered / uses, gathered / 2 if uses == 2 else 0.0
    waited = 0.0 if job.stack.prefetches_backward else again
    backward = again - waited + scattered
    return waited + _late(forward, stage.forward_s, blocks) + _late(backward, stage.backward_s, blocks)
