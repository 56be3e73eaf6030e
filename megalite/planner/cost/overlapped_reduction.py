"""Time of ZeRO-1's reduction of gradients beside the last backward passes, and of its gathers of new weights beside
the next forward. Pure arithmetic, no torch.

gradient_reduction.py starts a bucket as soon as the last micro-batch has made its last gradient, from the
model's end to its beginning, one after the other. So what can hide is what follows in the step: the rest of that
backward pass, those of the chunks before, and the wait for stages that end later. The last bucket, which holds the
first layers of a stage, begins when the stage is through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megalite.planner.cost.communication_time import Ring
from megalite.planner.cost.communication_volumes import Moved
from megalite.planner.cost.model_states import dealt_experts, trained_numbers
from megalite.planner.cost.stage_parameters import StageShape, embedding_parameters, widest_parameter
from megalite.planner.workload import TrainingWorkload
from megalite.schedules.simulation import LastGradients

Rings = tuple[Ring, Ring]  # of the copies of a weight, and of an expert that is dealt over some of them


def reduction_ends_s(
    job: TrainingWorkload, shape: StageShape, rings: Rings, last: Sequence[LastGradients], others_s: float
) -> float:
    """Returns when a stage's last bucket is reduced, in seconds after the end of the last backward of all stages, which
    may be later.

    `last` says when each chunk of the stage gets its last gradients, which are taken to come evenly over that pass.
    `others_s` is the time for which other messages use the same links meanwhile.
    """

    def seconds(numbers: float, of_experts: float = 0.0) -> float:
        size = job.bytes_per_gradient
        return sum(
            ring.seconds(Moved(reduce_scatter=round(part * size)))
            for ring, part in zip(rings, (numbers - of_experts, of_experts), strict=True)
        )

    embedding, experts = _embedding(job, shape), dealt_experts(job, shape)
    end_s = -math.inf
    for blocks, (begin_s, gradients_end_s) in zip(reversed(shape.chunks), reversed(last), strict=True):
        numbers = (trained_numbers(job, shape) - embedding) * blocks.count / shape.blocks
        buckets = math.ceil(numbers / _largest_bucket(job, shape))
        each_s = seconds(numbers / buckets, experts * blocks.count / shape.blocks / buckets)
        first_s = begin_s + (gradients_end_s - begin_s) / buckets
        # the links are busy from the bucket before or from the first one on, or the last one finds them free
        end_s = max(max(end_s, first_s) + buckets * each_s + others_s, gradients_end_s + each_s)
    # the embedding's gradient comes last, from its own layer or from a tied head
    return max(end_s, last[0].end_s) + seconds(embedding)


def gathers_wait_s(job: TrainingWorkload, shape: StageShape, rings: Rings, forward_s: float) -> float:
    """Returns how long a stage's first forward waits for new weights: for the first bucket, which holds the embedding
    where there is one, and for what takes longer to gather than a forward."""
    numbers = trained_numbers(job, shape)
    parts = numbers - (experts := dealt_experts(job, shape)), experts
    size = job.bytes_per_weight
    all_s = sum(ring.seconds(Moved(all_gather=round(part * size))) for ring, part in zip(rings, parts, strict=True))
    first = max(_embedding(job, shape), _largest_bucket(job, shape)) / max(1, numbers)
    return max(all_s * min(1.0, first), all_s - forward_s)


def _embedding(job: TrainingWorkload, shape: StageShape) -> int:
    """Returns the numbers of a stage's embedding that are trained."""
    is_trained = shape.has_embedding and not job.trains_adapters
    return embedding_parameters(job.model, job.layout.tensor_parallel_size) if is_trained else 0


def _largest_bucket(job: TrainingWorkload, shape: StageShape) -> float:
    """Returns the numbers of a block's largest bucket; a parameter with more than a bucket takes has one of its own."""
    sizes = job.layout.tensor_parallel_size, job.layout.expert_parallel_size
    return max(job.gradient_bucket_size, *(widest_parameter(job.model, layer, *sizes) for layer in shape.layers))
