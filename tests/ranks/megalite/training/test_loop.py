"""The state that the loop hands to checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.saver import Saved
from megalite.monitor.observer import Observer
from megalite.resilience.guards import Guard
from megalite.resilience.stop_requests import StopRequests
from megalite.training.checkpoints import Checkpoints
from megalite.training.loop import TrainerContext, train
from megalite.training.state import TrainState
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.faults import failing_writer
from tests.helpers.rank_pool import run_fresh_ranks
from tests.helpers.saving import SilentLog


class _Log(SilentLog):
    def __init__(self) -> None:
        self.saves: list[tuple[int, bool]] = []

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        self.saves.append((saved.step, saved.failure is None))


def _train_with_a_failed_save(rank: int, root: Path) -> tuple[list[tuple[int, bool]], list[TrainState]]:
    """Five steps; the save after the third fails, and none follows it but the retry at the end."""
    case = Case(steps=5)
    config, described, log = case.config(), [], _Log()
    guards = config.guards.model_copy(update={"loss_spike": "skip"})
    checkpoint = config.checkpoint.model_copy(update={"interval": 3, "save_last": False})
    config = config.model_copy(update={"guards": guards, "checkpoint": checkpoint})
    engine = engine_of(case)

    def describe(state: TrainState) -> Manifest:
        described.append(state)
        return Manifest(step=state.step, config={}, tokenizer=None, state=state.model_dump(), tensors={}, files={})

    failing_writer(root, rank, 0, 1)
    context = TrainerContext(
        batches=lambda state: (micro_batches_of(engine, case, batch) for batch in global_batches(case)),
        evaluation=[],
        lacks_evaluation=False,
        guard=Guard(engine, config.guards),
        checkpoints=Checkpoints(engine, config.checkpoint, root, log, describe),
        requests=StopRequests(None, 0.0),
        observer=Observer(),
    )
    train(engine, config, TrainState(), context)
    return log.saves, described


def test_a_save_that_is_retried_at_the_end_knows_what_the_guard_knows(tmp_path: Path) -> None:
    ((saves, described),) = run_fresh_ranks(_train_with_a_failed_save, 1, tmp_path)
    assert saves == [(3, False), (5, True)]
    assert [(state.step, len(state.guard["losses"])) for state in described] == [(3, 3), (5, 5)]


class _Taker:
    """Exports or a mirror: takes checkpoints, or is broken."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken, self.taken = is_broken, list[str]()

    def on_commit(self, checkpoint: Path) -> None:
        assert not self.is_broken, "it is closed"
        self.taken.append(checkpoint.name)

    def pinned(self) -> set[Path]:
        return set()

    def delete(self, checkpoints: Sequence[Path]) -> None:
        """There is nothing."""


def _saves_with_a_broken_taker(rank: int, root: Path) -> tuple[list[str], list[str], list[str]]:
    """Three saves with `keep_last` 1, of which the second cannot start a thread for what follows it."""
    engine, log, said = engine_of(Case()), _Log(), list[str]()
    log.log_warning = said.append  # type: ignore[method-assign]
    options = engine.config.checkpoint.model_copy(update={"keep_last": 1, "background": False})

    def describe(state: TrainState) -> Manifest:
        return Manifest(step=state.step, config={}, tokenizer=None, state=state.model_dump(), tensors={}, files={})

    mirror = _Taker()
    takers: Any = {"mirror": mirror, "exports": _Taker(is_broken=True)}
    checkpoints = Checkpoints(engine, options, root, log, describe, **takers)
    checkpoints.save(TrainState(step=1))
    start = threading.Thread.start

    def refuse(thread: Any) -> None:
        if getattr(thread._target, "__name__", "") == "_follow":
            raise RuntimeError("can't start new thread")
        start(thread)

    with patch.object(threading.Thread, "start", refuse):
        checkpoints.save_before_evaluation(TrainState(step=2), is_last=False)
    checkpoints.end_evaluation(0.5)
    checkpoints.save(TrainState(step=3))
    checkpoints.wait()
    return sorted(path.name for path in root.glob("step_*")), mirror.taken, said


def test_what_follows_a_save_fails_alone(tmp_path: Path) -> None:
    """Exports that failed kept the checkpoint from the mirror, which was called an old checkpoint that stays; a thread
    that could not start ended the next save in another error."""
    ((there, mirrored, said),) = run_fresh_ranks(_saves_with_a_broken_taker, 1, tmp_path)
    assert there == ["step_00000001", "step_00000002", "step_00000003"], "what a broken taker reads is not known"
    assert mirrored == ["step_00000001", "step_00000003"]
    assert said == [f"_Taker does not take step_0000000{step}: AssertionError('it is closed')" for step in (1, 3)]
