"""One rank of a run: what `deepspeed`, `torchrun` and `megalite train` start. The run in five lines: see `run`.

deepspeed --hostfile HOSTFILE launch/train.py CONFIG.yaml [section.option=value ...]
torchrun --nproc-per-node 8 -m launch.train CONFIG.yaml [section.option=value ...]
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and sys.path[0] == str(Path(__file__).resolve().parent):
    del sys.path[0]  # started as a script: this folder's modules must not shadow top-level ones

from launch.data import RunData, evaluation_batches, open_data, training_batches
from launch.devices import Device
from launch.errors import INTERRUPTED_CODE, STOPPED_CODE, USER_ERROR_CODE, USER_ERRORS, LaunchError
from launch.ranks import Rank, be_deterministic, this_rank
from launch.resume import Start, checkpoints_of, find_start
from launch.run_folder import lock_run_folder, write_receipt, write_settings
from megalite.config import Config, ResolvedLayout, load_config
from megalite.config.known_bad import check_known_bad, installed_versions
from megalite.training.errors import TrainingStopped

if TYPE_CHECKING:
    from megalite.engine.engine import Engine
    from megalite.monitor.sinks.base import Sink
    from megalite.training.loop import Job
    from megalite.training.state import TrainState

GRACE_S = 5.0


def run(config: Config, rank: Rank) -> None:
    """Mesh, data, model, engine, loop."""
    import torch

    from megalite.engine.distributed import is_same_on_all_ranks, start_distributed
    from megalite.engine.engine import build_engine
    from megalite.training.loop import train
    from models.decoder import decoder_layers

    lock = lock_run_folder(config) if rank.rank == 0 else None
    torch.set_float32_matmul_precision(config.precision.float32_matmul_precision)
    if config.training.deterministic:
        be_deterministic()
    device = start_distributed(rank.local_rank)
    kind: Device = "cuda" if device.type == "cuda" else "cpu"
    layout = config.check_world(rank.world_size, kind)
    check_known_bad(config, layout, installed_versions(), kind)
    data = open_data(config)
    start = find_start(config, data.training.fingerprint)
    if not is_same_on_all_ranks((data.training.fingerprint, start.step, start.checkpoint and start.checkpoint.name)):
        raise LaunchError(
            f"the ranks do not see the same data and checkpoints: data.path and run_dir {config.run_dir} must be on "
            "storage that all hosts share"
        )
    engine = build_engine(decoder_layers(config.model, config.recompute.mode), config, layout)
    state = _load(engine, start, data, config)
    with _Reporter(config, layout, rank, start, data) as reporter:
        state = train(engine, config, state, _job(engine, config, layout, data, start, state, reporter))
        reporter.outcome = {"finished": True, **state.model_dump()}
    del lock  # held until here


def _load(engine: Engine, start: Start, data: RunData, config: Config) -> TrainState:
    """Weights and optimizer into the engine; where the run stands out."""
    from megalite.checkpoint.engine import load_engine
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.training.state import TrainState

    if start.checkpoint is not None:
        load_engine(engine, CheckpointReader(start.checkpoint), weights_only=not start.is_resume)
    if start.is_resume and start.manifest is not None:
        return TrainState.model_validate(start.manifest.state)
    return TrainState(data_fingerprint=data.training.fingerprint, seed=config.training.seed)


def _job(
    engine: Engine,
    config: Config,
    layout: ResolvedLayout,
    data: RunData,
    start: Start,
    state: TrainState,
    reporter: _Reporter,
) -> Job:
    """What the loop is given from outside."""
    from megalite.checkpoint.engine import save_engine
    from megalite.training.loop import Job

    replica, steps = engine.coordinate.data_rank, config.total_steps - state.step
    evaluation = config.training.evaluation

    def save(state: TrainState) -> None:
        folder = save_engine(
            engine,
            checkpoints_of(config),
            step=state.step,
            config=config.model_dump(mode="json") | start.inherited,
            tokenizer=data.tokenizer,
            tokenizer_sha256=data.tokenizer_sha256,
            state=state.model_dump(),
        )
        reporter.say(f"saved {folder}")

    return Job(
        batches=training_batches(data, config, layout, replica, consumed=state.consumed_samples, steps=steps)
        if engine.needs_data
        else itertools.repeat([]),
        evaluation=evaluation_batches(data, config, layout, replica) if engine.needs_data else [],
        evaluation_count=evaluation.samples // (config.training.micro_batch_size * layout.data_parallel_size)
        if evaluation.interval
        else 0,
        log=reporter.log,
        save=save,
    )


class _Reporter:
    """Rank 0's voice: sinks, notices, receipt and picture; silent elsewhere."""

    def __init__(self, config: Config, layout: ResolvedLayout, rank: Rank, start: Start, data: RunData) -> None:
        self._config, self._layout, self._start, self._data = config, layout, start, data
        self._speaks = rank.rank == 0
        self._sinks: list[Sink] = []
        self.outcome: dict[str, Any] = {"finished": False}

    def __enter__(self) -> _Reporter:
        if self._speaks:
            from megalite.engine.deepspeed_config import deepspeed_config

            write_settings(self._config, deepspeed_config(self._config, self._layout))
            self._write_receipt()
            self._open_sinks()
            for notice in (*self._layout.notices, *self._data.notices, *self._start.notices):
                self.say(notice)
        return self

    def _open_sinks(self) -> None:
        from megalite.monitor.sinks.console import ConsoleSink
        from megalite.monitor.sinks.jsonl import JsonLines
        from megalite.monitor.sinks.wandb import WandbSink

        config, monitor = self._config, self._config.monitor
        self._sinks = [
            JsonLines(config.run_dir / "metrics.jsonl", self._start.step),
            ConsoleSink(config.total_steps, self._start.step, monitor.log_interval),
        ]
        if monitor.wandb.enabled:
            self._sinks.append(WandbSink(monitor.wandb, config.run_dir, config.model_dump(mode="json")))

    def log(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.log(record)

    def say(self, sentence: str) -> None:
        if self._speaks:
            print(f"megalite: {sentence}", flush=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for sink in self._sinks:
            sink.close()
        if not self._speaks:
            return
        try:
            self._write_receipt()
            if self._config.monitor.plot:
                self._draw()
        except OSError as error:  # the run is over, however it went: its own end must be heard
            self.say(f"receipt and picture could not be written: {error}")

    def _draw(self) -> None:
        from megalite.monitor.plot import plot_loss
        from megalite.monitor.sinks.jsonl import read_records

        picture = self._config.run_dir / "loss.png"
        plot_loss(read_records(self._config.run_dir / "metrics.jsonl"), picture, str(self._config.run_dir))
        self.say(f"drew {picture}")

    def _write_receipt(self) -> None:
        facts = {"data_fingerprint": self._data.training.fingerprint, "resumed_from_step": self._start.step}
        write_receipt(self._config, self._layout, facts | {"outcome": self.outcome})


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. What a user can mend is one sentence on stderr, said once per host."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher hands the local rank over a second time, as an argument
    words = [word for word in words if not word.startswith("--local_rank")]
    rank = None
    try:
        rank = this_rank()
        if rank is None:
            raise LaunchError("launch.train is one rank of a run: start it with deepspeed or torchrun, or use megalite")
        if not words:
            raise LaunchError("no config is given: name a YAML file, as in launch/train.py configs/quickstart.yaml")
        run(load_config(Path(words[0]), words[1:]), rank)
    except USER_ERRORS as error:
        _tell_once(str(error), rank)
        return USER_ERROR_CODE
    except TrainingStopped as error:
        if rank is not None and rank.rank == 0:
            print(f"megalite: stopped: {error}", file=sys.stderr, flush=True)
        _leave_together()
        return STOPPED_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    _leave_together()
    return 0


def _leave_together() -> None:
    from megalite.engine.distributed import stop_distributed

    stop_distributed()


def _tell_once(sentence: str, rank: Rank | None) -> None:
    """The launcher ends all ranks when one has ended, so local rank 0 speaks before any other leaves; another speaks
    only when it is still here after that, because the mistake was its own."""
    where = ""
    if rank is not None and rank.local_rank:
        time.sleep(GRACE_S)
        where = f"rank {rank.rank}: "
    print(f"megalite: error: {where}{sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
