"""The checkpoints of one run while it trains: saving, what is told of it, what stays, and the way back.

Nothing here ends a run but the failure of its last save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megalite.checkpoint.digests import newest_intact
from megalite.checkpoint.engine import load_engine
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.mirror import Mirror
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.retention import Retention, prune
from megalite.checkpoint.saver import Saved, Saver
from megalite.config import CheckpointConfig
from megalite.engine.activity import Phase
from megalite.engine.engine import Engine
from megalite.resilience.interval import IntervalPlanner
from megalite.training.errors import SaveFailed
from megalite.training.state import TrainState


class Voice(Protocol):
    """What a run says; silent on all ranks but the first."""

    def say(self, sentence: str) -> None:
        """A line on the console."""

    def event(self, name: str, **facts: Any) -> None:
        """A line in events.jsonl."""


class Exports(Protocol):
    """What makes other folders of checkpoints, beside the training."""

    def offer(self, checkpoint: Path) -> None:
        """Takes a complete checkpoint."""

    def protected(self) -> set[Path]:
        """Checkpoints that must not be deleted yet."""

    def delete(self, checkpoints: Sequence[Path]) -> None:
        """Hears which checkpoints are deleted."""


class Checkpoints:
    """One per rank. Methods are collective unless they say otherwise."""

    def __init__(
        self,
        engine: Engine,
        options: CheckpointConfig,
        root: Path,
        voice: Voice,
        describe: Callable[[TrainState], Manifest],
        mirror: Mirror | None = None,
        exports: Exports | None = None,
        planner: IntervalPlanner | None = None,
    ) -> None:
        """`describe` makes a manifest but for what is in the files. Rank 0 has the mirror, the exports, and the planner
        of `interval: auto`."""
        self._engine, self._options, self._root, self._voice = engine, options, root, voice
        self._describe, self._mirror, self._exports, self._planner = describe, mirror, exports, planner
        self._policy = Retention.of(options)
        self._saver = Saver(engine, root, background=options.background, committed=self._committed)
        self._saver.prepare()
        self._blocked_s = 0.0  # that no record has told yet
        self._last: Saved | None = None
        self._newest: Manifest | None = None  # of the newest save, however it went

    def save(self, state: TrainState, evaluation_loss: float | None = None) -> None:
        """Saves `state` and the engine as they are now."""
        self._save(self._describe(state).model_copy(update={"evaluation_loss": evaluation_loss}))

    def _save(self, manifest: Manifest) -> None:
        self._blocked_s += self._wait()
        self._engine.activity.begin(Phase.CHECKPOINT)
        self._blocked_s += self._saver.save(manifest)
        self._newest = manifest
        if self._planner is not None:
            self._planner.began()
        self._hear()

    def collect(self) -> float:
        """Tells of saves that have ended; returns the seconds that training has waited for saves since the last call.
        Not collective."""
        self._hear()
        blocked, self._blocked_s = self._blocked_s, 0.0
        return blocked

    def _wait(self) -> float:
        """Until no save is on its way; the seconds."""
        self._engine.activity.begin(Phase.WRITING)
        started = time.monotonic()
        self._saver.wait()
        return time.monotonic() - started

    def _hear(self) -> None:
        for saved in self._saver.finished():
            self._last = saved
            self._tell(saved)

    def is_due(self, step_time_s: float) -> bool:
        """Whether `interval: auto` wants a save after the coming step; rank 0's answer counts. Not collective."""
        return self._planner is not None and self._planner.step(step_time_s)

    def finish(self, state: TrainState) -> None:
        """Waits for the last save; where it failed, tries once more, with `state` as it is now. Raises SaveFailed."""
        self._blocked_s += self._wait()
        self._hear()
        if self._last is None or self._last.failure is None:
            return
        is_same = self._newest is not None and self._newest.step == state.step
        self._save(self._newest if is_same and self._newest else self._describe(state))
        self._blocked_s += self._wait()
        self._hear()
        if self._last.failure:
            raise SaveFailed(f"the state of step {state.step} could not be saved: {self._last.failure}")

    def settle(self) -> float:
        """Waits for a save that is on its way; returns as `collect` does."""
        self._blocked_s += self._wait()
        return self.collect()

    def roll_back(self, state: TrainState) -> tuple[TrainState, float | None] | None:
        """The state of the newest intact checkpoint, loaded into the engine, and its evaluation loss; None where there
        is none yet.

        It is to be saved at once: a run that dies before would meet the same data again and know of no rollback.
        """
        self._blocked_s += self._wait()
        self._engine.activity.begin(Phase.LOADING)
        folder, _ = newest_intact(self._root, state.step, self._engine.activity.progress)
        if folder is None:
            self._voice.say("there is no checkpoint to go back to yet: the step is skipped")
            return None
        reader = CheckpointReader(folder)
        load_engine(self._engine, reader, weights_only=False)
        returned = state.rolled_back(TrainState.model_validate(reader.manifest.state))
        evaluation_loss = reader.manifest.evaluation_loss
        left_out = returned.excluded_samples[-1]
        self._voice.event("rolled_back", step=state.step, to_step=returned.step, excluded_samples=left_out)
        self._voice.say(f"back to step {returned.step}, without samples {left_out[0]} to {left_out[1] - 1}")
        return returned, evaluation_loss

    def _committed(self, folder: Path) -> None:
        """On rank 0, in the thread that wrote the checkpoint."""
        # itself too: a damaged one of a later step, which a resume has passed over, may look newer
        protect = {folder}
        try:
            for follower in (self._exports, self._mirror):
                if follower is not None:
                    follower.offer(folder)
                    protect |= follower.protected()
            deleted = prune(self._root, self._policy, protect)
            if self._exports is not None:
                self._exports.delete(deleted)
        except CheckpointError as error:
            self._voice.say(f"an old checkpoint stays, training goes on: {error}")

    def _tell(self, saved: Saved) -> None:
        facts = {"step": saved.step, "blocked_s": round(saved.blocked_s, 4), "total_s": round(saved.total_s, 4)}
        if saved.failure is not None:
            self._voice.event("save_failed", **facts, reason=saved.failure)
            self._voice.say(f"step {saved.step} is not saved, training goes on: {saved.failure}")
            return
        self._voice.event("saved", **facts, bytes=saved.bytes)
        self._voice.say(
            f"saved {saved.folder} ({saved.bytes / 1e6:.1f} MB; training waited {saved.blocked_s:.2f} s, "
            f"all took {saved.total_s:.2f} s)"
        )
        if self._planner is not None:
            self._planner.saved(saved.blocked_s, saved.total_s)
