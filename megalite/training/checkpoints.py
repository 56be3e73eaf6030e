"""The checkpoints of one run while it trains: saving, retention, rollback, and the hooks that follow a commit.

Nothing here ends a run but the failure of its last save, and a rollback that finds no checkpoint whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.intact_checkpoint import newest_intact
from megalite.checkpoint.manifest import Manifest, step_folder, step_folders, step_of
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.remote.mirror import Mirror
from megalite.checkpoint.retention import Retention, prune
from megalite.checkpoint.saver import Saved, Saver
from megalite.checkpoint.writer import write_evaluation
from megalite.config.sections import CheckpointConfig
from megalite.engine.engine import Engine
from megalite.monitor.events import EventName
from megalite.resilience.checkpoint_interval import IntervalPlanner
from megalite.tracing.activity import Phase
from megalite.training.state import SaveFailed, TrainState

TRAINING_GOES_ON = "training goes on"


class RunLog(Protocol):
    """The log of a run; a no-op on ranks other than 0."""

    def log_notice(self, sentence: str) -> None:
        """Logs a line on the console."""

    def log_warning(self, sentence: str) -> None:
        """Logs a line about what was lost, or may be."""

    def event(self, name: EventName, **facts: Any) -> None:
        """Appends a line to events.jsonl."""

    def sync(self) -> None:
        """Waits until all records of steps and all events so far are on disk, or have been reported as refused."""

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        """Logs a save that has ended. `if_failed` says what follows a failure; if empty, an error will tell of it."""


class Exports(Protocol):
    """Makes other folders from checkpoints while training goes on."""

    def on_commit(self, checkpoint: Path) -> None:
        """Takes a complete checkpoint."""

    def pinned(self) -> set[Path]:
        """Returns the checkpoints that must not be deleted yet."""

    def delete(self, checkpoints: Sequence[Path]) -> None:
        """Is called after retention has deleted checkpoints."""


class Checkpoints:
    """The checkpoints of a run, as seen by one rank. Methods are collective unless documented otherwise."""

    def __init__(
        self,
        engine: Engine,
        options: CheckpointConfig,
        root: Path,
        run_log: RunLog,
        describe: Callable[[TrainState], Manifest],
        mirror: Mirror | None = None,
        exports: Exports | None = None,
        planner: IntervalPlanner | None = None,
    ) -> None:
        """`describe` makes a manifest without the entries of its files.

        `mirror`, `exports` and `planner`, of `interval: auto`, are on rank 0 only.
        """
        self._engine, self._options, self._root, self._run_log = engine, options, root, run_log
        self._describe, self._mirror, self._exports, self._planner = describe, mirror, exports, planner
        self._policy = Retention.of(options)
        self._saver = Saver(
            engine, root, background=options.background, committing=run_log.sync, committed=self._committed
        )
        self._saver.prepare()
        self._blocked_s = 0.0  # that training waited for saves since the last `take_blocked_s`
        self._last: Saved | None = None
        self._newest: Manifest | None = None  # of the newest save, complete or not
        self._awaited_loss: Future[float | None] | None = None  # from an evaluation behind the newest save
        self._following: threading.Thread | None = None  # waits for it, on rank 0
        self.saved_step = 0  # up to which nothing would be lost; on rank 0
        self._if_failed = TRAINING_GOES_ON

    def save(self, state: TrainState, evaluation_loss: float | None = None, *, is_last: bool = False) -> None:
        """Saves `state` and the engine as they are now; `is_last` if the run ends then."""
        self._save(self._describe(state).model_copy(update={"evaluation_loss": evaluation_loss}), _if_failed(is_last))
        self.report()

    def save_before_evaluation(self, state: TrainState, is_last: bool) -> None:
        """Saves as `save` does, but what follows a commit waits for `end_evaluation`, which must be called whatever
        happens, and nothing is logged before `report`, which is called once the step is on record."""
        self._save(self._describe(state), _if_failed(is_last), loss=Future())

    def end_evaluation(self, loss: float | None) -> None:
        """Adds a loss to the checkpoint that was saved before; without one, as the run ends, waits for the save."""
        if self._newest is not None and self._awaited_loss is not None:
            self._newest = self._newest.model_copy(update={"evaluation_loss": loss})
            self._awaited_loss.set_result(loss)
        if loss is None:
            self._wait()

    def add_evaluation(self, step: int, loss: float) -> None:
        """Adds a loss to the checkpoint of a step, as a resumed run does that has begun from it. Not collective."""
        if dist.get_rank() == 0:
            self._follow(self._root / step_folder(step), lambda: loss, hooks=(self._mirror,))

    def _save(self, manifest: Manifest, if_failed: str, loss: Future[float | None] | None = None) -> None:
        self._wait()
        self.report()  # of the save before
        self._awaited_loss, self._if_failed = loss, if_failed
        self._engine.activity.begin_phase(Phase.CHECKPOINT)
        self._blocked_s += self._saver.save(manifest)
        self._newest = manifest
        if self._planner is not None:
            self._planner.began()

    def take_blocked_s(self) -> float:
        """Returns the seconds that training has waited for saves since the last call. Not collective."""
        blocked, self._blocked_s = self._blocked_s, 0.0
        return blocked

    def report(self) -> None:
        """Logs the saves that have ended. Not collective."""
        for saved in self._saver.finished():
            self._last = saved
            self._run_log.on_checkpoint(saved, self._if_failed)
            if self._planner is not None and saved.failure is None:
                self._planner.saved(saved.blocked_s, saved.total_s)

    def wait(self) -> float:
        """Waits for a save that is being written, and logs it; returns what `take_blocked_s` does."""
        self._wait()
        self.report()
        return self.take_blocked_s()

    def _wait(self) -> None:
        self._engine.activity.begin_phase(Phase.WRITING)
        started = time.monotonic()
        self._saver.wait()
        if self._following is not None and self._following.ident is not None:  # it may not have begun
            self._following.join()
        self._blocked_s += time.monotonic() - started

    def step_ended(self, step_time_s: float) -> bool:
        """Returns whether `interval: auto` wants a save after the coming step; rank 0 decides. Not collective."""
        return self._planner is not None and self._planner.step(step_time_s)

    def finish(self, state: TrainState) -> None:
        """Waits for the last save; if it failed, tries once more, with `state` as it is now. Raises SaveFailed."""
        self._wait()
        self.report()
        if self._last is None or self._last.failure is None:
            return
        newest = self._newest
        self._save(newest if newest is not None and newest.step == state.step else self._describe(state), if_failed="")
        self._wait()
        self.report()
        if self._last.failure:
            raise SaveFailed(f"the state of step {state.step} could not be saved: {self._last.failure}")

    def roll_back(self, state: TrainState) -> tuple[TrainState, float | None] | None:
        """Loads the newest intact checkpoint into the engine; returns its state and its evaluation loss.

        Returns None if there is no checkpoint yet. Save the returned state immediately; otherwise a crash would replay
        the excluded samples.
        """
        self._wait()
        self._engine.activity.begin_phase(Phase.LOADING)
        folder, skipped = newest_intact(self._root, state.step, self._engine.activity.progress)
        for reason in skipped:
            self._run_log.log_warning(f"passed over: {reason}")
        if folder is None:
            self._run_log.log_notice("there is no checkpoint to go back to yet: the step is skipped")
            return None
        reader = CheckpointReader(folder)
        load_engine(self._engine, reader, weights_only=False)
        returned = state.rolled_back(TrainState.model_validate(reader.manifest.state))
        first, stop = returned.excluded_samples[-1]
        self._run_log.event("rolled_back", step=state.step, to_step=returned.step, excluded_samples=(first, stop))
        self._run_log.log_notice(f"back to step {returned.step}, without samples {first} to {stop - 1}")
        return returned, reader.manifest.evaluation_loss

    def _committed(self, folder: Path) -> None:
        """Runs on rank 0, in the thread that wrote the checkpoint."""
        self.saved_step = max(self.saved_step, step_of(folder.name))
        if self._awaited_loss is None:
            self._follow(folder, lambda: None, (self._exports, self._mirror))
            return
        # a thread of its own: without `background` this is the thread that evaluates next
        arguments = folder, self._awaited_loss.result, (self._exports, self._mirror)
        self._following = threading.Thread(target=self._follow, args=arguments, daemon=True)
        self._following.start()

    def _follow(
        self, folder: Path, evaluated: Callable[[], float | None], hooks: Sequence[Exports | Mirror | None]
    ) -> None:
        """Does what follows a commit, which needs to know how well the checkpoint has been evaluated."""
        try:
            if (loss := evaluated()) is not None:
                write_evaluation(folder, loss)
        except Exception as error:
            self._run_log.log_warning(f"its evaluation loss is not in a checkpoint, training goes on: {error}")
        # a damaged checkpoint of a later step, which a resume has passed over, may look newer than `folder`
        protect = {folder}
        for hook in (one for one in hooks if one is not None):
            try:
                hook.on_commit(folder)
                protect |= hook.pinned()
            except Exception as error:
                self._run_log.log_warning(f"{type(hook).__name__} does not take {folder.name}: {error!r}")
                protect |= set(step_folders(self._root))  # it is not known which it still reads
        try:
            deleted = prune(self._root, self._policy, protect)
            if self._exports is not None:
                self._exports.delete(deleted)
        except Exception as error:  # the checkpoint is complete all the same
            self._run_log.log_notice(f"an old checkpoint stays, training goes on: {error}")


def _if_failed(is_last: bool) -> str:
    return "it is tried once more" if is_last else TRAINING_GOES_ON
