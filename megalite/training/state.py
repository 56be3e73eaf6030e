"""The state of a run beside the engine's weights and optimizer, as plain JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class TrainState(BaseModel):
    """Progress of a run after `step` optimizer steps, skipped ones included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = 0
    consumed_samples: int = 0  # the data's only position: sample k is a pure function of (fingerprint, seed, k)
    tokens_seen: int = 0
    skipped_steps: int = 0  # steps that changed nothing: not finite, or refused by a guard
    excluded_samples: tuple[tuple[int, int], ...] = ()  # [first, stop) ranges that rollbacks have excluded
    guard: dict[str, Any] = {}  # state of megalite.resilience.guards.Guard
    data_fingerprint: str = ""
    seed: int = 0

    def after(self, *, samples: int, tokens: int, skipped: bool) -> TrainState:
        """Returns the state one step later."""
        return self.model_copy(
            update={
                "step": self.step + 1,
                "consumed_samples": self.consumed_samples + samples,
                "tokens_seen": self.tokens_seen + tokens,
                "skipped_steps": self.skipped_steps + skipped,
            }
        )

    def rolled_back(self, to: TrainState) -> TrainState:
        """Returns the state `to` of a checkpoint, but past the samples consumed since.

        PaLM (arXiv:2204.02311, section 5.1) went around its loss spikes in this way; training from there on other data
        did not bring them back.
        """
        excluded = (*to.excluded_samples, (to.consumed_samples, self.consumed_samples))
        return to.model_copy(update={"consumed_samples": self.consumed_samples, "excluded_samples": excluded})
