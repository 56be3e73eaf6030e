"""Items of `training.stages`: a change of the batch in the course of the run; and where any stage begins."""

from __future__ import annotations

from pydantic import Field

from megalite.config.base import BatchCount, NonNegativeInt, PositiveInt, Section


class StageStart(Section):
    """Place of a run from which a stage counts, at the first step that begins there or later."""

    from_tokens: NonNegativeInt | None = Field(default=None, examples=[10_000_000_000])
    """Place at which the stage begins, in training tokens."""

    from_steps: NonNegativeInt | None = Field(default=None, examples=[200_000])
    """Place at which the stage begins, in optimizer steps; give this or `from_tokens`."""

    @property
    def place(self) -> str:
        """The place as the config names it: `from_tokens 1000`."""
        return f"from_tokens {self.from_tokens}" if self.from_steps is None else f"from_steps {self.from_steps}"


class TrainingStage(StageStart):
    """Batch of the run from a place on, at the first step that begins there or later; what is left out stays."""

    global_batch_size: BatchCount | None = Field(default=None, examples=[512])
    """Sequences per optimizer step. Left out: as before the stage."""

    sequence_length: PositiveInt | None = Field(default=None, examples=[8192])
    """Tokens per sequence; the longest of a run is a multiple of all others. Left out: as before the stage."""

    micro_batch_size: PositiveInt | None = Field(default=None, examples=[1])
    """Sequences per forward pass on one replica. Left out: as before the stage."""
