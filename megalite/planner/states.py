"""What a run's weights, gradients and optimizer take of each device at least. Pure arithmetic, no torch."""

from __future__ import annotations

from megalite.config import Config, ResolvedLayout
from megalite.config.deepspeed import has
from megalite.planner.volumes import BYTES, StageShape

MOMENTS = {"adamw": 2, "sgd": 0}  # fp32 numbers per parameter


def state_bytes(config: Config, layout: ResolvedLayout, stage: StageShape) -> int:
    """Bytes on a rank of `stage` between two steps, without activations, buffers and gradients: those may be there or
    not.

    Rajbhandari 2020 (ZeRO), section 3.1: weights in `precision.dtype`, and for mixed precision an fp32 copy, beside the
    fp32 moments. Section 5: over d replicas stages 1 to 3 cut copy and moments, stage 3 weights too. What is
    offloaded to the host is on no device.
    """
    size, replicas = BYTES[config.precision.dtype], layout.data_parallel_size
    weights = size * stage.parameters // (replicas if layout.zero_stage == 3 else 1)
    optimizer = 4 * (MOMENTS[config.optimizer.name] + (size < 4)) * stage.parameters // replicas
    offloaded = {
        name: has(config.deepspeed, ("zero_optimization", f"offload_{name}")) for name in ("param", "optimizer")
    }
    return (0 if offloaded["param"] else weights) + (0 if offloaded["optimizer"] else optimizer)
