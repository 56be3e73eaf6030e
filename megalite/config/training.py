"""Section `training`: batch, length and guards of the run."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megalite.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class EvaluationConfig(Section):
    """Loss on held-out documents while training."""

    interval: NonNegativeInt = 0
    """Steps between evaluations; 0 = never."""

    samples: PositiveInt = 64
    """Held-out sequences per evaluation; a multiple of `micro_batch_size` x data-parallel size."""


class TrainingConfig(Section):
    """The run: how much is read per step, for how long, and when it stops by itself."""

    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all replicas and micro-batches."""

    micro_batch_size: PositiveInt
    """Sequences per forward pass on one replica; decides memory, not results; `auto`: chosen with the layout."""

    sequence_length: PositiveInt
    """Tokens per sequence."""

    steps: PositiveInt | None = None
    """Length of the run in optimizer steps; give this or `tokens`."""

    tokens: PositiveInt | None = None
    """Length of the run in training tokens, rounded up to whole steps; give this or `steps`."""

    seed: NonNegativeInt = 0
    """Seed of the initial weights, of the order of the data and of dropout."""

    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; larger ones are scaled down to it. 0 = off."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Loss on held-out documents while training."""

    max_minutes: PositiveFloat | None = None
    """Wall-clock limit: the run saves and ends with exit code 75 at the first step that ends after it."""

    self_check_every: NonNegativeInt = 0
    """Steps between checks that all ranks' copies of a weight are equal to the bit; before every save too. 0 = off."""

    deterministic: bool = False
    """Two runs of one config on equal machines are equal to the bit; GPUs take slower kernels, a CPU none."""

    initialize_from: Path | None = None
    """Weights to start from: a Hugging Face folder or hub id (`model` may then be left out), or our own checkpoint."""
