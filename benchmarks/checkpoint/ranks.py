"""Shared parts of benchmarks/checkpoint: an engine on each rank, and clocks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import config_of, random_batches
from launch.parity.forked_ranks import run_ranks
from megalite.config import resolve_layout

if TYPE_CHECKING:
    from megalite.checkpoint.manifest import Manifest
    from megalite.checkpoint.saver import Saved, Saver

SEQUENCE = 64
TIME_LIMIT_S = 1800
IDLE_SHARE, IDLE_WITHIN_S = 0.8, 20
Turn = dict[str, float]  # what was measured -> seconds or MiB


class Trainer:
    """An engine on this rank, fed random tokens."""

    def __init__(self, model: dict[str, int], ranks: int, zero_stage: int = 1, warm_up_steps: int = 2) -> None:
        import numpy as np
        import torch

        from megalite.engine.build import build_engine
        from models.decoder import decoder_layers

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        parallel = {"data_parallel_size": ranks, "zero_stage": zero_stage}
        config = config_of(model | {"max_position_embeddings": SEQUENCE}, ranks, SEQUENCE, parallel=parallel)
        self.engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, ranks, "cpu"))
        self._draw, self._vocabulary = np.random.default_rng(self.engine.coordinate.data_rank), model["vocab_size"]
        for _ in range(warm_up_steps):
            self.step()

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        batches = random_batches(self._draw, self._vocabulary, (1, 1, SEQUENCE))
        return timed(lambda: float(self.engine.train_step(batches, 1e-4).loss))

    def saver(self, root: Path, *, background: bool) -> Saver:
        from megalite.checkpoint.saver import Saver

        return Saver(self.engine, root, background=background)

    def load(self, folder: Path) -> None:
        from megalite.checkpoint.engine_state import load_engine
        from megalite.checkpoint.reader import CheckpointReader

        load_engine(self.engine, CheckpointReader(folder), weights_only=False)


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def together(action: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    import torch.distributed as dist

    def wait() -> None:
        action()
        dist.barrier()

    dist.barrier()
    return timed(wait)


def manifest(step: int) -> Manifest:
    from megalite.checkpoint.manifest import Manifest

    return Manifest(step=step, config={}, tokenizer=None, state={}, tensors={}, files={})


def succeeded(saver: Saver) -> Saved:
    """Returns the outcome of the save that has just ended."""
    saver.wait()
    (saved,) = saver.finished()
    assert saved.failure is None, saved.failure
    return saved


def settle(root: Path, *, remove: bool = True) -> None:
    """Collective. Removes what earlier turns wrote, and waits for the disk, and for a while for the processors."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        for path in (*root.glob("step_*"), root / "copy") if remove else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.sync()
        deadline = time.monotonic() + IDLE_WITHIN_S
        while idle_share() < IDLE_SHARE and time.monotonic() < deadline:
            pass
    dist.barrier()


def idle_share() -> float:
    """Measures the idle share of all processors' time over half a second."""
    before, _, after = processor_times(), time.sleep(0.5), processor_times()  # type: ignore[func-returns-value]
    passed = [late - early for early, late in zip(before, after, strict=True)]
    return (passed[3] + passed[4]) / sum(passed)


def processor_times() -> list[int]:
    """user, nice, system, idle, iowait and others, of the whole machine (man 5 proc)."""
    return [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]


def ranks_turns(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Turn]:
    """Returns the measurement of each turn of `function` on the slowest rank."""
    runs = run_ranks(function, ranks, *arguments, timeout_s=TIME_LIMIT_S)
    return [{name: max(turn[name] for turn in turns) for name in turns[0]} for turns in zip(*runs, strict=True)]
