"""What a run knows beside the engine's weights: the second of the three owners of state, plain JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class TrainState(BaseModel):
    """Where a run stands after `step` optimizer steps, skipped ones included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = 0
    consumed_samples: int = 0  # the data's only position: sample k is a pure function of (fingerprint, seed, k)
    tokens_seen: int = 0
    skipped_steps: int = 0  # steps that changed nothing: not finite, or refused by a guard
    excluded_samples: tuple[tuple[int, int], ...] = ()  # [first, last) ranges that rollbacks have left behind
    guard: dict[str, Any] = {}  # what the guards remember of past steps: megalite.resilience.guards
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
            }
        )

    def rolled_back(self, to: TrainState) -> TrainState:
        """The state of a checkpoint, but past the data that led here: PaLM (arXiv:2204.02311, section 5.1) went around
        its loss spikes in this way, and training there again on other data did not bring them back."""
        left_out = (to.consumed_samples, self.consumed_samples)
        return to.model_copy(
            update={
                "consumed_samples": self.consumed_samples,
                "excluded_samples": (*to.excluded_samples, left_out),
            }
        )
