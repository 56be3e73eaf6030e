"""The section `compression`, and the bytes that its codecs send for a number."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megalite.config.base import PositiveFraction, Section

BLOCK = 256  # numbers that share a scale of 4 bytes
ENTRY_BYTES = 6  # of one number that top_k sends: its place in 4 bytes, its value in bf16
BITS = {"int8": 8, "int4": 4}


class CompressionConfig(Section):
    """Smaller messages between replicas that slow links connect; with ZeRO-1. See docs/slow_links.md."""

    gradients: Literal["none", "int8", "int4", "top_k"] = Field(default="none", examples=["int8"])
    """Gradients as codes with a scale per 256, or the largest of each weight's; what is left goes with later steps."""

    weights: Literal["none", "int8"] = Field(default="none", examples=["int8"])
    """`int8` sends the change of updated weights in place of the weights."""

    density: PositiveFraction = Field(default=0.01, examples=[0.01])
    """Share of the gradients of a weight that `top_k` sends in a step."""

    def bytes_per_gradient(self, uncompressed: float) -> float:
        """Returns the bytes that a replica sends for one gradient."""
        if self.gradients == "none":
            return uncompressed
        return self.density * ENTRY_BYTES if self.gradients == "top_k" else bytes_per_code(BITS[self.gradients])

    def bytes_per_weight(self, uncompressed: float) -> float:
        """Returns the bytes that a replica sends for one updated weight."""
        return uncompressed if self.weights == "none" else bytes_per_code(BITS[self.weights])


def bytes_per_code(bits: int) -> float:
    """Returns the bytes of a number in a block of codes."""
    return bits / 8 + 4 / BLOCK
