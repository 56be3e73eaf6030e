"""Section `recompute`: trade computation for activation memory."""

from __future__ import annotations

from typing import Literal

from megalite.config.base import Section


class RecomputeConfig(Section):
    """Activations that the backward pass computes again instead of keeping them."""

    mode: Literal["none", "selective", "full"] = "none"
    """`selective` recomputes the cheap parts of a block, `full` whole blocks (a third more compute)."""
