"""Costs that Muon adds to a step: the numbers that it keeps one moment of, gathers and makes orthogonal."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config import ModelConfig
from megalite.parallel.mesh import attention_matrices
from megalite.planner.cost.stage_parameters import StageShape, cut
from megalite.planner.workload import TrainingWorkload

Matrix = tuple[int, int]  # rows and columns of one of Hugging Face's matrices, whole
ITERATIONS = 5  # of Newton and Schulz, of three products each


def _matrices(model: ModelConfig, layer: int) -> Iterator[tuple[Matrix, int]]:
    """Yields the matrices of a block that are made orthogonal, and how many of each there are."""
    hidden = model.hidden_size
    for matrix in attention_matrices(model):
        if matrix.cut != "none":  # whole sides first
            sides = matrix.inputs, matrix.outputs
            yield (sides if matrix.cut == "outputs" else sides[::-1]), 1
    if model.has_experts(layer):
        assert model.num_experts is not None
        yield (hidden, model.moe_intermediate_size), 3 * model.num_experts
        if model.n_shared_experts:
            yield (hidden, model.shared_size), 3
    else:
        yield (hidden, model.intermediate_size), 3 if model.gated_mlp else 2


def orthogonalized_numbers(model: ModelConfig, stage: StageShape, tensor_parallel_size: int) -> int:
    """Returns the numbers of such matrices on one rank of a stage, before ZeRO cuts them, padding included."""
    each = (
        count * hidden * cut(features, tensor_parallel_size)
        for layer in stage.layers
        for (hidden, features), count in _matrices(model, layer)
    )
    return sum(each)


def gathered_over_replicas(job: TrainingWorkload, stage: StageShape) -> int:
    """Returns the bytes of the updates that replicas gather in bf16."""
    if job.optimizer != "muon" or job.layout.replicas == 1:
        return 0
    return 2 * orthogonalized_numbers(job.model, stage, job.layout.tensor_parallel_size)


def gathered_over_tensor_ranks(job: TrainingWorkload, stage: StageShape) -> int:
    """Returns the bytes of the parts that tensor-parallel ranks gather of the matrices in a rank's partitions, as if
    partitions ended where matrices do."""
    tp = job.layout.tensor_parallel_size
    if job.optimizer != "muon" or tp == 1:
        return 0
    return 2 * tp * orthogonalized_numbers(job.model, stage, tp) // job.layout.replicas


def orthogonalizing_flops(job: TrainingWorkload, stage: StageShape) -> float:
    """Returns the FLOPs of a rank of a stage, as if partitions ended where matrices do: tensor-parallel ranks do the
    same matrices, replicas their own. One that is cut by partitions is done by each of them."""
    if job.optimizer != "muon":
        return 0.0
    flops = 0.0
    for layer in stage.layers:
        for sides, count in _matrices(job.model, layer):
            short, long = min(sides), max(sides)
            flops += count * ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)
    return flops / job.layout.replicas


def working_bytes(job: TrainingWorkload, bucket: float, partition: float) -> float:
    """Returns the bytes of a bucket's update while its matrices are made orthogonal.

    The new momentum's fp32 sum of the partition, bf16 numbers of the bucket as replicas gather them, and of the whole
    matrices in the partition those of all tensor-parallel ranks, the matrices, their batches and the results.
    """
    if job.optimizer != "muon":
        return 0.0
    whole = job.layout.tensor_parallel_size * partition
    return 4.0 * partition + 2.0 * (bucket + partition) + 2.0 * 4 * whole
