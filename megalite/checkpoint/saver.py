"""Saves checkpoints during training: a step waits for the copy to host memory, a thread does the rest.

Every rank has a `Saver`. Their threads meet in collectives of a process group of their own, so that a checkpoint is
committed when all ranks' files are on disk, and a failure of one rank is known to all. Nothing that goes wrong here
ends a run: the outcome has the reason, and the next save tries again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint.durable_files import sync, temporary_folder
from megalite.checkpoint.engine_state import OwnState, own_blocks, own_size
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import FileEntry, Manifest, step_folder
from megalite.checkpoint.writer import Block, check_room, commit, discard, now, start, write_blocks
from megalite.distributed.agreement import from_all_ranks
from megalite.engine.deepspeed.loss_scale import loss_scaler_state
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import moment_names, optimizer_step_count

log = logging.getLogger(__name__)
LONGEST_SAVE = timedelta(hours=6)
BYTES_STORED = 4  # per number
PAGE_NUMBERS = 1024  # fp32 in a page, of the smallest size there is
Written = tuple[  # a rank's files, shapes and other moments by canonical name, and numbers by kind
    dict[str, FileEntry], dict[str, tuple[int, ...]], dict[str, tuple[str, ...]], Counter[str]
]


@dataclass(frozen=True)
class Saved:
    """Outcome of a save; equal on all ranks except for the seconds."""

    step: int
    folder: Path
    failure: str | None  # None: the checkpoint is complete
    blocked_s: float  # that training waited for it
    total_s: float  # until it was committed
    bytes: int  # of all ranks


class Saver:
    """Writes checkpoints of one engine into `root`, at most one at a time."""

    def __init__(
        self,
        engine: Engine,
        root: Path,
        *,
        background: bool,
        committing: Callable[[], None] = lambda: None,
        committed: Callable[[Path], None] | None = None,
    ) -> None:
        """Collective. `committing()` is called on rank 0, in the writing thread, before each commit, and
        `committed(folder)` after it."""
        self._engine, self._root, self._background = engine, root, background
        self._committing, self._committed = committing, committed
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_SAVE)
        self._host = _HostMemory()
        self._thread: threading.Thread | None = None
        self._outcomes: list[Saved] = []

    def prepare(self) -> None:
        """Maps the memory for saves in the background before the first save, which would wait for it otherwise.

        Not collective, and done in a thread.
        """
        if self._background:
            size = own_size(self._engine)
            self._thread = threading.Thread(target=self._host.allocate, args=size, name="host memory", daemon=True)
            self._thread.start()

    def save(self, manifest: Manifest) -> float:
        """Saves the engine's state as it is now; collective. Returns the seconds that training waited.

        `manifest` has step, config and the run's state; the contents of the files are filled in here. Waits first for
        the previous save.
        """
        started = time.monotonic()
        self.wait()
        own = OwnState([], {}, {})
        failure: Exception | None = None
        try:
            own = own_blocks(self._engine)
            facts = {
                "written": now(),
                "moments": moment_names(self._engine),
                "optimizer_steps": optimizer_step_count(self._engine),
                "loss_scaler": loss_scaler_state(self._engine.deepspeed.optimizer),
            }
            manifest = manifest.model_copy(update=facts)
            if self._background:
                own = own._replace(blocks=self._host.copy(own.blocks))
        except Exception as error:  # no memory, for one: the other ranks must hear of it
            failure = error
        blocked = time.monotonic() - started if self._background else None
        write = partial(self._write, manifest, own, started, blocked, failure)
        if blocked is None:
            write()
            return time.monotonic() - started
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        return blocked

    def finished(self) -> list[Saved]:
        """Returns the outcomes that are new since the last call; another rank may learn of one a step later."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Waits until neither a save nor its preparation is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self, manifest: Manifest, own: OwnState, started: float, blocked: float | None, error_before: Exception | None
    ) -> None:
        folder = self._root / step_folder(manifest.step)
        failure, size = None, 0
        try:
            size = sum(self._gather(lambda: _size(own.blocks, error_before), int))
            self._gather(lambda: self._start(folder, size), None)
            prefix = f"rank_{dist.get_rank():05d}"
            written = self._gather(
                lambda: (
                    write_blocks(temporary_folder(folder), prefix, own.blocks),
                    own.shapes,
                    own.other_moments,
                    _counts(own.blocks),
                ),
                Written,
            )
            self._gather(lambda: self._commit(folder, manifest, written), None)
        except Exception as error:  # whatever it is, training goes on
            failure = str(error) or repr(error)
            if dist.get_rank() == 0:
                discard(folder)
        total = time.monotonic() - started
        if failure is None and dist.get_rank() == 0 and self._committed is not None:
            try:
                self._committed(folder)
            except Exception as error:  # the checkpoint is complete all the same
                log.warning(f"what follows the save of {folder.name} has not begun: {error!r}")
        blocked = total if blocked is None else blocked
        self._outcomes = [*self._outcomes, Saved(manifest.step, folder, failure, blocked, total, size)]

    def _start(self, folder: Path, size: int) -> None:
        if dist.get_rank() == 0:
            temporary = start(folder)
            check_room(temporary, size)

    def _commit(self, folder: Path, manifest: Manifest, written: Sequence[Written]) -> None:
        if dist.get_rank() == 0:
            files = {name: file for own, *_ in written for name, file in own.items()}
            tensors = {name: shape for _, own, *_ in written for name, shape in own.items()}
            others = {name: moments for *_, own, _ in written for name, moments in own.items()}
            filled_in = manifest.model_copy(update={"files": files, "tensors": tensors, "other_moments": others})
            counts, wanted = sum((own for *_, own in written), Counter[str]()), Counter[str]()
            for name, shape in tensors.items():
                wanted.update(dict.fromkeys(filled_in.kinds_of(name), math.prod(shape)))
            for kind, whole in wanted.items():  # nothing is committed that a reader would find incomplete
                if counts[kind] != whole:
                    raise CheckpointError(
                        f"{folder}: the ranks hold {counts[kind]} numbers of {kind}, the model has {whole}"
                    )
            self._committing()
            sync(temporary_folder(folder))
            commit(folder, filled_in)

    def _gather(self, action: Callable[[], Any], of: object) -> list[Any]:
        """Returns every rank's result of `action`, which is of type `of`; a failure on one rank is raised on all.

        A rank that fails alone would leave the others waiting in the next collective.
        """
        results, failure = [], None
        try:
            results = [action()]
        except Exception as error:
            failure = (str(error) or repr(error)).encode(errors="backslashreplace").decode()  # names of files
        outcome = tuple[list[of], str | None]  # type: ignore[valid-type]
        everyone = from_all_ranks((results, failure), outcome, self._group)
        for rank, (_, why) in enumerate(everyone):
            if why is not None:
                raise CheckpointError(why if rank == 0 else f"rank {rank}: {why}")
        return [value for values, _ in everyone for value in values]


def _size(blocks: Sequence[Block], error_before: Exception | None) -> int:
    if error_before is not None:
        raise error_before
    return sum(BYTES_STORED * block.numbers.numel() for block in blocks)


def _counts(blocks: Sequence[Block]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for block in blocks:
        counts[block.key.partition("/")[0]] += block.numbers.numel()
    return counts


class _HostMemory:
    """Host memory for the copy of a rank's state, kept between saves: it is mapped, and pinned for a GPU, once."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def allocate(self, count: int, device: torch.device) -> None:
        """Allocates memory for `count` numbers of `device`, and maps it."""
        with contextlib.suppress(RuntimeError, MemoryError):  # the save tries again and reports it
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with the first one
                self._numbers = torch.empty(count, pin_memory=True)
            else:
                self._numbers = torch.empty(count)
                self._numbers.numpy()[::PAGE_NUMBERS] = 0  # without the interpreter's lock

    def copy(self, blocks: Sequence[Block]) -> list[Block]:
        """Copies the blocks; all are copied when this returns."""
        needed = sum(block.numbers.numel() for block in blocks)
        gpu = next((block.numbers.device for block in blocks if block.numbers.is_cuda), None)
        if self._numbers.numel() < needed:
            self._numbers = torch.empty(needed, pin_memory=gpu is not None)
        copied, offset = [], 0
        for block in blocks:
            size = block.numbers.numel()
            target = self._numbers[offset : offset + size].view(block.numbers.shape)
            target.copy_(block.numbers, non_blocking=True)
            copied.append(replace(block, numbers=target))
            offset += size
        if gpu is not None:
            torch.cuda.current_stream(gpu).synchronize()
        return copied
