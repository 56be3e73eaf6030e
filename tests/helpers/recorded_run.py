"""A whole training loop on ranks of a test, with an observer that keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.saver import Saved
from megalite.config import Config
from megalite.engine.engine import Engine
from megalite.monitor.observer import Observer
from megalite.monitor.steps.breakdown import StepBreakdown
from megalite.monitor.steps.slow_ranks import SlowRank
from megalite.resilience.guards import Guard
from megalite.resilience.stop_requests import StopRequests
from megalite.training.checkpoints import Checkpoints
from megalite.training.evaluation import EvaluationSet
from megalite.training.loop import TrainerContext, train
from megalite.training.state import TrainState
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of


class KeptLog(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.breakdowns: list[StepBreakdown] = []
        self.slow: list[SlowRank] = []

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    def on_step(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def on_breakdown(self, breakdown: StepBreakdown) -> None:
        self.breakdowns.append(breakdown)

    def on_slow_rank(self, change: SlowRank) -> None:
        self.slow.append(change)

    def log_notice(self, sentence: str) -> None:
        """Sentences of saves are looked at elsewhere."""

    def log_warning(self, sentence: str) -> None:
        """And warnings."""

    def event(self, name: str, **facts: Any) -> None:
        """And events."""

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        assert saved.failure is None, saved.failure


def config_of(case: Case, run_dir: Path, monitor: dict[str, Any], guards: dict[str, Any] | None = None) -> Config:
    """The case's config with an evaluation, a self-check and a save in every second step."""
    values = case.config().model_dump(mode="json")
    values["run_dir"] = str(run_dir)
    values["monitor"] = monitor
    values["checkpoint"]["interval"] = 2
    values["training"] |= {"self_check_every": 2}
    values["training"]["evaluation"] |= {"interval": 2}
    values["guards"] |= guards or {}
    return Config.model_validate(values)


def train_case(
    case: Case,
    config: Config,
    log: KeptLog,
    batches_of: Callable[[Engine, list[Any]], Iterable[Any]] = lambda engine, batches: batches,
    state: TrainState | None = None,
) -> None:
    """Trains the case from its initial weights, and from `state` if that is given.

    `batches_of` may change the batches, or the engine while they are taken.
    """
    engine = engine_of(case)
    batches = [micro_batches_of(engine, case, batch) for batch in global_batches(case)]
    context = TrainerContext(
        batches=lambda state: iter(batches_of(engine, batches)),
        evaluation=[EvaluationSet("", batches[0], case.accumulation, 1)],
        lacks_evaluation=False,
        guard=Guard(engine, config.guards),
        checkpoints=Checkpoints(
            engine,
            config.checkpoint,
            config.run_dir,
            log,
            lambda state: Manifest(
                step=state.step, config={}, tokenizer=None, state=state.model_dump(), tensors={}, files={}
            ),
        ),
        requests=StopRequests(None, 0.0),
        observer=log,
    )
    train(engine, config, state or TrainState(), context)
