"""Memory of weights, gradients and optimizer on each rank, with the buffers that DeepSpeed copies them through.

Rajbhandari 2020 (ZeRO), section 3.1: weights in `precision.dtype`, for mixed precision an fp32 copy, and moments.
Section 5: over d replicas stages 1 to 3 cut copy and moments, stages 2 and 3 gradients too, stage 3 weights too.
DeepSpeed 0.19 adds buffers and copies; where each is made is named beside it. Pure arithmetic, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.config import Config, ModelConfig, ResolvedLayout
from megalite.config.deepspeed import has
from megalite.config.sections import AdapterConfig
from megalite.parallel.mesh import attention_matrices
from megalite.planner.cost.muon import orthogonalized_numbers, working_bytes
from megalite.planner.cost.stage_parameters import StageShape, cut
from megalite.planner.workload import BYTES, TrainingWorkload

MOMENTS = {"adamw": 2, "muon": 2, "sgd": 0}  # numbers per parameter; Muon keeps one of a matrix in a block
BUCKET = 50_000_000  # numbers per gathering, megalite/engine/deepspeed/config.py; ZeRO-3's prefetch, by default
MOST_LIVE = 1_000_000_000  # numbers that ZeRO-3 keeps gathered: stage3_max_live_parameters; also its sub-groups


@dataclass(frozen=True)
class States:
    """Bytes of weights, gradients and optimizer on one rank."""

    weights: float
    optimizer: float  # fp32 copy and moments
    gradients: float  # of a step, once backward is through
    stay: bool = False  # that buffer is always there
    opened: float = 0.0  # the first of buffers that exist from their first gradient on
    one_gradient: float = 0.0  # of one parameter, on its way into the flat buffer
    bucket: float = 0.0  # through which gradients are reduced while backward runs
    reducing: float = 0.0  # copies, once backward is through
    own_gradients: float = 0.0  # what the step still needs of `gradients`
    stepping: float = 0.0  # copies before the optimizer updates
    updating: float = 0.0  # gradients and copies while it does
    gathered: float = 0.0  # weights that ZeRO-3 gathers
    building: float = 0.0  # weights before DeepSpeed makes them flat, and copies, freed before the first step


def deepspeed_states(
    job: TrainingWorkload, numbers: float, owned: float, largest: float, orthogonalized: float = 0.0
) -> States:
    """Returns the states of a stage with so many numbers, `owned` of them after ZeRO's cut, `largest` of them in one
    parameter, and as many as `orthogonalized` in matrices that Muon would take."""
    zero, in_rounds = job.layout.zero_stage, job.layout.zero_stage == 2 and job.layout.replicas > 1
    states_of = _zero_3 if zero == 3 else _reduced_in_rounds if in_rounds else _reduced_beside_backward
    states = states_of(job, numbers, owned, largest)
    if job.optimizer != "muon":
        return states
    d = job.layout.replicas
    bucket = min(orthogonalized, max(job.gradient_bucket_size, largest))
    return replace(
        states,
        optimizer=states.optimizer - BYTES[job.moments_dtype] * orthogonalized / d,
        updating=states.updating + working_bytes(job, bucket, bucket / d),
    )


def with_frozen_weights(states: States, size: int, numbers: int) -> States:
    """Returns the states of adapters beside a model of so many numbers of `size` bytes that stay as they are."""
    return replace(states, weights=states.weights + size * numbers)


def _reduced_beside_backward(job: TrainingWorkload, numbers: float, owned: float, largest: float) -> States:
    """Follows engine/reduction/gradient_reduction.py: gradients are added to flat sums, those of BF16_Optimizer
    (runtime/bf16_optimizer.py) or ones that live from a bucket's first gradient to the end of the step. A bucket is
    rounded for the sum over replicas, or copied by gloo. fp32 weights are updated where they are."""
    size, accumulated, d = BYTES[job.dtype], BYTES[job.gradient_accumulation_dtype], job.layout.replicas
    is_bf16_optimizer = job.layout.zero_stage < 2 and not job.offloads_optimizer
    has_sums = job.dtype == "bf16" and accumulated == 4 and is_bf16_optimizer
    is_coded = d > 1 and job.compression.gradients != "none"
    widened = 4 * owned if accumulated < 4 or is_coded else 0.0  # this rank's partition
    has_copy = size < 4 or job.compression.weights != "none"
    gradients, bucket = accumulated * numbers, min(numbers, max(job.gradient_bucket_size, largest))
    return States(
        weights=size * numbers,
        optimizer=_optimizer(job, has_copy) * owned + 4 * numbers * is_coded,  # what is still to be told
        gradients=gradients,
        stay=has_sums,
        opened=0.0 if has_sums else accumulated * bucket,
        one_gradient=size * largest,
        reducing=(job.bytes_per_gradient * bucket if d > 1 else 0.0) + widened,
        own_gradients=gradients + widened,
        updating=(0.0 if has_sums else gradients) + widened + _sgd(job, owned),
        building=_first_copies(job, numbers, owned),
    )


def _reduced_in_rounds(job: TrainingWorkload, numbers: float, owned: float, largest: float) -> States:
    """Follows engine/reduction/gradient_reduction.py for ZeRO-2: one flat sum is filled while one is on the wire, and
    this rank's partition takes up what comes out. Where a stage has several chunks, a chunk's sums wait for the others.
    """
    size, accumulated, on_wire = BYTES[job.dtype], BYTES[job.gradient_accumulation_dtype], BYTES[job.reduction_dtype]
    bucket = min(numbers, max(job.gradient_bucket_size, largest))
    waiting = numbers if job.layout.pipeline_chunks > 1 else 2 * bucket
    own = 4 * owned
    return States(
        weights=size * numbers,
        optimizer=_optimizer(job, size < 4) * owned,
        gradients=own,
        one_gradient=size * largest,
        bucket=accumulated * waiting + on_wire * bucket * (on_wire != accumulated),
        own_gradients=own,
        updating=own + _sgd(job, owned),
        building=_first_copies(job, numbers, owned),
    )


def _zero_3(job: TrainingWorkload, numbers: float, owned: float, largest: float) -> States:
    """Follows runtime/zero/stage3.py and partition_parameters.py: an fp32 copy also of fp32 weights; weights stay
    gathered up to `MOST_LIVE`, beside the buffer of a prefetch, of which a pipeline has none. Gradients are those of
    ZeRO-2, but that a bucket's parts are put together for each replica."""
    prefetched = 0 if job.layout.pipeline_parallel_size > 1 else min(max(numbers - largest, largest), BUCKET)
    size, d = BYTES[job.dtype], job.layout.replicas
    states = (_reduced_in_rounds if d > 1 else _reduced_beside_backward)(job, numbers, owned, largest)
    is_same = job.reduction_dtype == job.gradient_accumulation_dtype and d > 1
    together = BYTES[job.reduction_dtype] * min(numbers, max(job.gradient_bucket_size, largest)) * is_same
    return replace(
        states,
        weights=size * owned,
        optimizer=_optimizer(job, True) * owned,
        bucket=states.bucket + together,
        gathered=size * (min(numbers, MOST_LIVE + largest) + prefetched),
        building=size * owned,
    )


def _first_copies(job: TrainingWorkload, numbers: float, owned: float) -> float:
    """Returns the bytes of weights as layers are made; for fp32 training also the partition's clone and its zeros in
    `initialize_optimizer_states`, whose room the moments take where there is one replica."""
    is_cut = job.dtype == "fp32" and job.layout.replicas > 1
    return BYTES[job.dtype] * numbers + 8 * owned * is_cut


def _optimizer(job: TrainingWorkload, has_copy: bool) -> int:
    """Returns the bytes of optimizer state per parameter."""
    return BYTES[job.moments_dtype] * MOMENTS[job.optimizer] + 4 * has_copy


def _sgd(job: TrainingWorkload, owned: float) -> float:
    """Returns the bytes on the device of the gradient's copy to which torch's SGD adds weight decay."""
    is_here = job.optimizer == "sgd" and not job.offloads_optimizer
    return 4 * owned if is_here else 0.0


def state_bytes(config: Config, layout: ResolvedLayout, stage: StageShape) -> int:
    """Returns the bytes on a rank of `stage` between two steps, without activations, buffers and gradients, which
    may or may not exist then. State offloaded to the host counts on no device."""
    size, replicas = BYTES[config.precision.dtype], layout.replicas
    weights = size * stage.parameters // (replicas if layout.zero_stage == 3 else 1)
    trained = stage.parameters + (layout.expert_parallel_size - 1) * stage.experts  # as often as its parts are owned
    if config.adapter.name != "none":
        trained = adapter_numbers(config.model, config.adapter, stage, layout.tensor_parallel_size)
        weights += size * trained
    options, moment = config.optimizer, BYTES[config.optimizer.moments_dtype]
    optimizer = (moment * MOMENTS[options.name] + 4 * (size < 4)) * trained
    if options.name == "muon":
        optimizer -= moment * orthogonalized_numbers(config.model, stage, layout.tensor_parallel_size)
    optimizer //= replicas
    has_no_weights = has(config.deepspeed, ("zero_optimization", "offload_param"))
    has_no_optimizer = config.is_optimizer_offloaded
    return (0 if has_no_weights else weights) + (0 if has_no_optimizer else optimizer)


def trained_numbers(job: TrainingWorkload, stage: StageShape) -> int:
    """Returns the numbers on one rank of a stage that are trained, before ZeRO cuts them, padding included."""
    if not job.trains_adapters:
        return stage.parameters
    return adapter_numbers(job.model, job.adapter, stage, job.layout.tensor_parallel_size)


def owned_numbers(job: TrainingWorkload, stage: StageShape) -> float:
    """Returns the numbers that a rank of a stage owns after ZeRO's cut: of an expert's it has a larger part, because
    fewer ranks hold them."""
    again = (job.layout.expert_parallel_size - 1) * dealt_experts(job, stage)
    return (trained_numbers(job, stage) + again) / job.layout.replicas


def dealt_experts(job: TrainingWorkload, stage: StageShape) -> int:
    """Returns the trained numbers of a rank's experts that not all replicas hold."""
    return stage.experts if job.layout.expert_parallel_size > 1 and not job.trains_adapters else 0


def adapter_numbers(model: ModelConfig, adapter: AdapterConfig, stage: StageShape, tensor_parallel_size: int) -> int:
    """Returns the numbers of adapters on one rank of a stage; 0 without any."""
    tp, hidden, features = tensor_parallel_size, model.hidden_size, model.intermediate_size
    sides = {matrix.name: sum(matrix.sides(tp)) for matrix in attention_matrices(model)}
    if model.num_experts is None:
        dense = ("gate_proj", "up_proj", "down_proj") if model.gated_mlp else ("up_proj", "down_proj")
        sides |= dict.fromkeys(dense, cut(features, tp) + hidden)
    # of each projection one factor has the side that is cut as the weight is, the other the whole one
    return stage.blocks * adapter.rank * sum(size for name, size in sides.items() if adapter.adapts(name))
