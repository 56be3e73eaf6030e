"""Section `precision`: number formats of weights, gradients and matrix products."""

from __future__ import annotations

from typing import Literal

from megalite.config.base import Section

Dtype = Literal["fp32", "bf16", "fp16"]


class PrecisionConfig(Section):
    """Number formats. Master weights and optimizer state are fp32 whatever is chosen here."""

    dtype: Dtype = "bf16"
    """Format of weights and activations in forward and backward; fp16 needs a GPU."""

    gradient_accumulation_dtype: Dtype = "fp32"
    """Format in which micro-batches' gradients are summed: fp32, or the same as `dtype`."""

    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """PyTorch's `set_float32_matmul_precision`: below `highest`, fp32 products are faster and less exact."""
