"""What a run knows beside the engine's weights: the second of the three owners of state, plain JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TrainState(BaseModel):
    """Where a run stands after `step` optimizer steps, skipped ones included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = 0
    consumed_samples: int = 0  # the data's only position: sample k is a pure function of (fingerprint, seed, k)
    tokens_seen: int = 0
    skipped_steps: int = 0  # steps whose gradients were not finite
    consecutive_skipped_steps: int = 0
    data_fingerprint: str = ""
    seed: int = 0

    def after(self, *, samples: int, tokens: int, skipped: bool) -> TrainState:
        """The state one step later."""
        return self.model_copy(
            update={
                "step": self.step + 1,
                "consumed_samples": self.consumed_samples + samples,
                "tokens_seen": self.tokens_seen + tokens,
                "skipped_steps": self.skipped_steps + skipped,
                "consecutive_skipped_steps": self.consecutive_skipped_steps + 1 if skipped else 0,
            }
        )
