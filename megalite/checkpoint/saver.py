"""Saving while training goes on: a step waits for the copy to host memory, a thread does the rest.

Every rank has a `Saver`. Their threads meet in collectives of a process group of their own, so that a checkpoint is
committed when all ranks' files are on disk, and a failure of one rank is known to all. Nothing that goes wrong here
ends a run: the outcome says what it was, and the next save tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint.engine import own_blocks
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.files import sync
from megalite.checkpoint.manifest import FileEntry, Manifest, step_folder
from megalite.checkpoint.writer import (
    Block,
    check_room,
    commit,
    discard,
    now,
    start,
    temporary_folder,
    write_blocks,
)
from megalite.engine.engine import Engine
from megalite.engine.seams import loss_scaler_state
from megalite.engine.state import moment_names, optimizer_step_count

LONGEST_SAVE = timedelta(hours=6)


@dataclass(frozen=True)
class Saved:
    """How a save went; equal on all ranks but for the seconds."""

    step: int
    folder: Path
    failure: str | None  # None: the checkpoint is complete
    blocked_s: float  # that training waited for it
    total_s: float  # until it was committed
    bytes: int  # of all ranks


class Saver:
    """Writes checkpoints of one engine into `root`; at most one is on its way."""

    def __init__(
        self, engine: Engine, root: Path, *, background: bool, committed: Callable[[Path], None] | None = None
    ) -> None:
        """Collective. `committed(folder)` is called on rank 0, in the writing thread, after each commit."""
        self._engine, self._root, self._background = engine, root, background
        self._committed = committed
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_SAVE)
        self._host = _HostMemory()
        self._thread: threading.Thread | None = None
        self._outcomes: list[Saved] = []

    def save(self, manifest: Manifest) -> float:
        """Saves the engine's state as it is now; collective. Returns the seconds that training waited.

        `manifest` says step, config and the run's state; what is in the files is filled in here. Waits first for the
        save before.
        """
        started = time.monotonic()
        self.wait()
        blocks, shapes = own_blocks(self._engine)
        manifest = manifest.model_copy(
            update={
                "written": now(),
                "moments": moment_names(self._engine),
                "optimizer_steps": optimizer_step_count(self._engine),
                "loss_scaler": loss_scaler_state(self._engine.deepspeed.optimizer),
            }
        )
        if not self._background:
            self._write(manifest, blocks, shapes, started, None)
            return time.monotonic() - started
        blocks = self._host.copy(blocks)
        blocked = time.monotonic() - started
        self._thread = threading.Thread(
            target=self._write, args=(manifest, blocks, shapes, started, blocked), name="checkpoint", daemon=True
        )
        self._thread.start()
        return blocked

    def finished(self) -> list[Saved]:
        """The outcomes that are known now and have not been told yet; another rank may know one a step later."""
        told, self._outcomes = self._outcomes, []
        return told

    def wait(self) -> None:
        """Waits until nothing is on its way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        manifest: Manifest,
        blocks: list[Block],
        shapes: dict[str, tuple[int, ...]],
        started: float,
        blocked: float | None,
    ) -> None:
        folder = self._root / step_folder(manifest.step)
        failure, size = None, sum(block.numbers.nbytes for block in blocks)
        try:
            size = sum(self._gather(lambda: size))
            self._gather(lambda: self._start(folder, size))
            prefix = f"rank_{dist.get_rank():05d}"
            written = self._gather(lambda: (write_blocks(temporary_folder(folder), prefix, blocks), shapes))
            self._gather(lambda: self._commit(folder, manifest, written))
        except Exception as error:  # whatever it is, training goes on
            failure = str(error) or repr(error)
            if dist.get_rank() == 0:
                discard(folder)
        total = time.monotonic() - started
        if failure is None and dist.get_rank() == 0 and self._committed is not None:
            self._committed(folder)
        blocked = total if blocked is None else blocked
        self._outcomes = [*self._outcomes, Saved(manifest.step, folder, failure, blocked, total, size)]

    def _start(self, folder: Path, size: int) -> None:
        if dist.get_rank() == 0:
            temporary = start(folder)
            check_room(temporary, size)

    def _commit(
        self,
        folder: Path,
        manifest: Manifest,
        written: Sequence[tuple[dict[str, FileEntry], dict[str, tuple[int, ...]]]],
    ) -> None:
        if dist.get_rank() == 0:
            files = {name: file for files, _ in written for name, file in files.items()}
            tensors = {name: shape for _, shapes in written for name, shape in shapes.items()}
            sync(temporary_folder(folder))
            commit(folder, manifest.model_copy(update={"files": files, "tensors": tensors}))

    def _gather(self, action: Callable[[], Any]) -> list[Any]:
        """Every rank's result of `action`; a failure on one rank is raised on all.

        A rank that fails alone would leave the others waiting in the next collective.
        """
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = str(error) or repr(error)
        everyone: list[tuple[Any, str | None]] = [(None, None)] * dist.get_world_size()
        dist.all_gather_object(everyone, (result, failure), group=self._group)
        for rank, (_, why) in enumerate(everyone):
            if why is not None:
                raise CheckpointError(why if rank == 0 else f"rank {rank}: {why}")
        return [value for value, _ in everyone]


class _HostMemory:
    """Room for the copy of a rank's state, kept from save to save: pages are mapped, and pinned on a GPU, once."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def copy(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks with numbers of their own, all copied when this returns."""
        needed = sum(block.numbers.numel() for block in blocks)
        on_gpu = any(block.numbers.is_cuda for block in blocks)
        if self._numbers.numel() < needed:
            self._numbers = torch.empty(needed, pin_memory=on_gpu)
        copied, offset = [], 0
        for block in blocks:
            size = block.numbers.numel()
            target = self._numbers[offset : offset + size].view(block.numbers.shape)
            target.copy_(block.numbers, non_blocking=True)
            copied.append(replace(block, numbers=target))
            offset += size
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copied
