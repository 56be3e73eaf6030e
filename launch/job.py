"""What the training loop is given from outside: data, guards, checkpoints, requests and a voice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from launch.data import RunData, evaluation_batches, training_batches
from launch.followers import Followers
from launch.plan.own_run import memory_of_ranks
from launch.reporter import Reporter
from launch.resume import Start, checkpoints_of
from launch.run_tokenizer import KnownTokenizer, tokenizer_of
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config, ResolvedLayout
from megalite.training.errors import TrainingPreempted, TrainingStopped

if TYPE_CHECKING:
    from megalite.engine.engine import Engine
    from megalite.training.loop import Job
    from megalite.training.state import TrainState


@contextmanager
def open_job(
    engine: Engine,
    config: Config,
    layout: ResolvedLayout,
    data: RunData,
    start: Start,
    state: TrainState,
    reporter: Reporter,
    followers: Followers,
    born: float,
) -> Iterator[Job]:
    """Open while the run trains; `born` is when the process started, by `time.monotonic`."""
    from megalite.resilience.guards import Guard
    from megalite.resilience.requests import Requests
    from megalite.training.checkpoints import Checkpoints
    from megalite.training.loop import Job

    replica, evaluation = engine.coordinate.data_rank, config.training.evaluation

    def batches(state: TrainState) -> Iterator[Any]:
        if not engine.needs_data:
            return itertools.repeat([])
        steps = config.total_steps - state.step
        return training_batches(data, config, layout, replica, consumed=state.consumed_samples, steps=steps)

    tokenizer = cache(partial(tokenizer_of, config, data))  # once rank 0 has kept it
    checkpoints = Checkpoints(
        engine,
        config.checkpoint,
        checkpoints_of(config),
        reporter,
        describe=lambda state: _manifest(config, layout, tokenizer(), start, state),
        mirror=followers.mirror,
        exports=followers.exporter,
        planner=reporter.interval_planner(),
    )
    guard = Guard(engine, config.guards, data.training.documents)
    guard.restore(state.guard)
    with Requests(config.training.max_minutes, born) as requests:
        job = Job(
            batches=batches,
            evaluation=evaluation_batches(data, config, layout, replica) if engine.needs_data else [],
            evaluation_count=evaluation.samples // (config.training.micro_batch_size * layout.data_parallel_size)
            if evaluation.interval
            else 0,
            guard=guard,
            checkpoints=checkpoints,
            requests=requests,
            log=reporter.log,
            intervened=reporter.intervened,
        )
        try:
            yield job
        except (TrainingStopped, TrainingPreempted) as error:
            ending = "stopped" if isinstance(error, TrainingStopped) else "preempted"
            _end(engine, reporter, ending, checkpoints.settle())
            raise
        except KeyboardInterrupt:
            reporter.ends("interrupted", 0.0)
            reporter.compares(())
            raise
        _end(engine, reporter, "ended", checkpoints.settle())


def _end(engine: Engine, reporter: Reporter, ending: str, untold_s: float) -> None:
    """Written down first: a rank may be gone when all are asked for their memory."""
    reporter.ends(ending, untold_s)
    reporter.compares(memory_of_ranks(engine, reporter.own_run.memory()))


def _manifest(
    config: Config, layout: ResolvedLayout, tokenizer: KnownTokenizer, start: Start, state: TrainState
) -> Manifest:
    """All of a checkpoint's manifest but what depends on its files."""
    return Manifest(
        step=state.step,
        layout={
            "tensor_parallel_size": layout.tensor_parallel_size,
            "pipeline_parallel_size": layout.pipeline_parallel_size,
            "data_parallel_size": layout.data_parallel_size,
            "zero_stage": layout.zero_stage,
        },
        config=config.model_dump(mode="json") | start.inherited,
        tokenizer=tokenizer.folder,
        tokenizer_sha256=tokenizer.sha256,
        state=state.model_dump(mode="json"),
        tensors={},
        files={},
    )
