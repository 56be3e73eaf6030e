"""Section `parallel`: how the model and the batch are cut over processes."""

from __future__ import annotations

from typing import Literal

from megalite.config.base import PositiveInt, Section


class ParallelConfig(Section):
    """The layout. Every layout computes the same thing; they differ in memory and speed."""

    tensor_parallel_size: PositiveInt = 1
    """Number of ranks that share every layer."""

    pipeline_parallel_size: PositiveInt = 1
    """Number of stages the layers are dealt to; the division may be uneven."""

    data_parallel_size: PositiveInt | Literal["auto"] = "auto"
    """Number of replicas; `auto` uses all processes that tensor and pipeline parallelism leave."""

    sequence_parallel: bool = False
    """Cut activations between parallel layers along the sequence; no effect without tensor parallelism."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What data parallelism shards: 1 optimizer state, 2 also gradients, 3 also weights; 0 is served by 1."""
