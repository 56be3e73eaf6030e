"""Rules of compressed messages between replicas."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.compression import CompressionConfig
from megalite.config.config import Config


def problems_with_compression(config: Config) -> Iterator[str]:
    """Yields a sentence for each broken rule."""
    compression, parallel, precision = config.compression, config.parallel, config.precision
    default = CompressionConfig.model_fields["density"].default
    if compression.density != default and compression.gradients != "top_k":
        yield (
            f"compression.density {compression.density} has no effect with compression.gradients "
            f"{compression.gradients}: set compression.gradients top_k, or remove compression.density"
        )
    used = [
        f"compression.{name} {kind}"
        for name in ("gradients", "weights")
        if (kind := getattr(compression, name)) != "none"
    ]
    if not used:
        return
    option = used[0]
    if parallel.zero_stage > 1 and ("parallel", "zero_stage") not in config.unresolved_options:
        yield (
            f"{option} does not go with parallel.zero_stage {parallel.zero_stage}, which sends gradients once for each "
            "micro-batch and keeps no sums to which an error could be added: use zero_stage 1, or "
            "precision.gradient_reduction_dtype bf16 in place of compression"
        )
    if precision.dtype == "fp16":
        yield f"{option} does not go with precision.dtype fp16, whose loss scale changes what an error is: use bf16"
    if config.is_optimizer_offloaded:
        yield f"{option} does not go with an optimizer on the host, whose copies are whole: use offload.optimizer none"
    if compression.gradients != "none" and precision.reduction_dtype != "fp32":
        yield (
            f"compression.gradients {compression.gradients} replaces precision.gradient_reduction_dtype "
            f"{precision.reduction_dtype}: set that to fp32, or compression.gradients to none"
        )
