"""Faults that happen inside a rank, at an exact place in what it does.

Each is called in a rank before it starts, as `function(folder, rank, *arguments)`, and wraps our own functions in that
process. The kills are real: SIGKILL, to the ranks named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

from tests.helpers.warm_runs import Fault, pid_of

Strike = Callable[[], None]
DAY_S = 86_400.0


def impatient(folder: Path, rank: int) -> None:
    """Whoever is left when a peer is gone asks the dead for a shorter time than on a cluster."""
    from megalite.resilience import watchdog

    whole = watchdog.Watchdog.__init__

    def hurried(self: watchdog.Watchdog, *arguments: Any, **named: Any) -> None:
        whole(self, *arguments, **named)
        assert self._poll_s > 0.1
        self._poll_s = 0.1

    watchdog.Watchdog.__init__, watchdog.LOST_S = hurried, 0.3


def die_at(folder: Path, rank: int, instant: str, at_rank: int, victims: Sequence[int], save: int) -> None:
    """SIGKILL to `victims` when `at_rank` comes to the `instant` of the session's save number `save`, from 1."""
    impatient(folder, rank)
    if rank != at_rank:
        return
    from megalite.checkpoint.saver import Saver

    begun = 0
    whole = Saver.save

    def strike() -> None:
        if begun < save:
            return
        for victim in sorted(victims, key=lambda victim: victim == rank):  # itself last
            os.kill(pid_of(folder, victim), signal.SIGKILL)

    def counted(self: Saver, *arguments: Any) -> float:
        nonlocal begun
        begun += 1
        return whole(self, *arguments)

    Saver.save = counted
    INSTANTS[instant](strike)


def _before(owner: Any, name: str, strike: Strike, when: Callable[..., bool] = lambda *_: True) -> None:
    """Strikes before `owner.name(...)` does its work, where `when` holds for its arguments."""
    whole = getattr(owner, name)

    def struck(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            strike()
        return whole(*arguments, **named)

    setattr(owner, name, struck)


def _host_copy(strike: Strike) -> None:
    from megalite.checkpoint import saver

    copied = 0

    def in_the_middle(*_: Any) -> bool:
        nonlocal copied
        copied += 1
        return copied % 5 == 0

    _before(saver, "replace", strike, in_the_middle)  # once per block that has been copied


def _half_a_file(strike: Strike) -> None:
    from megalite.checkpoint.huggingface.safetensors_writer import ALIGNMENT

    whole = os.pwrite

    def half(descriptor: int, data: memoryview, offset: int) -> int:
        written = whole(descriptor, data[: len(data) // 2 // ALIGNMENT * ALIGNMENT], offset)
        strike()
        return written + whole(descriptor, data[written:], offset + written)

    os.pwrite = half


def _file_not_synced(strike: Strike) -> None:
    _before(os, "fsync", strike, lambda descriptor: _name_of(descriptor).endswith(".safetensors"))


def _name_of(descriptor: int) -> str:
    return Path(f"/proc/self/fd/{descriptor}").readlink().name


def _own_files_written(strike: Strike) -> None:
    from megalite.checkpoint import saver

    whole = saver.write_blocks

    def struck(*arguments: Any) -> Any:
        written = whole(*arguments)
        strike()
        return written

    saver.write_blocks = struck


def _all_files_written(strike: Strike) -> None:
    from megalite.checkpoint import saver

    _before(saver, "commit", strike)


def _manifest_not_in_place(strike: Strike) -> None:
    _before(Path, "replace", strike, lambda path, _: path.name == ".manifest.json.tmp")


def _manifest_written(strike: Strike) -> None:
    _before(Path, "rename", strike, lambda path, _: path.name.startswith(".step_") and path.suffix == ".tmp")


def _renamed(strike: Strike) -> None:
    from megalite.checkpoint import writer

    # of the folder of checkpoints: nothing but a rename is synced there
    _before(writer, "sync", strike, lambda path: path.name == "checkpoints")


def _latest_not_in_place(strike: Strike) -> None:
    _before(Path, "replace", strike, lambda path, _: path.name == ".latest.tmp")


def _committed(strike: Strike) -> None:
    from megalite.training import checkpoints

    _before(checkpoints, "prune", strike)


def _hidden_to_delete(strike: Strike) -> None:
    _before(shutil, "rmtree", strike, lambda path, *_: path.suffix == ".deleted")


def _half_deleted(strike: Strike) -> None:
    def half(path: Path, *_: Any) -> bool:
        if path.suffix != ".deleted" or not path.exists():
            return False
        next(path.iterdir()).unlink()
        return True

    _before(shutil, "rmtree", strike, half)


def _damaged_one_put_aside(strike: Strike) -> None:
    _before(
        Path,
        "rename",
        strike,
        lambda path, _: path.suffix == ".tmp" and path.with_name(f"{path.stem}.replaced").exists(),
    )


ON_ALL_RANKS: dict[str, Callable[[Strike], None]] = {
    "in the host copy": _host_copy,
    "in the middle of a file": _half_a_file,
    "before a file is synced": _file_not_synced,
    "own files written": _own_files_written,
}
ON_RANK_0: dict[str, Callable[[Strike], None]] = {
    "all files written": _all_files_written,
    "manifest not in place": _manifest_not_in_place,
    "manifest written, not renamed": _manifest_written,
    "renamed, not synced": _renamed,
    "renamed, latest not moved": _latest_not_in_place,
    "committed, not pruned": _committed,
    "old one hidden, not deleted": _hidden_to_delete,
    "old one half deleted": _half_deleted,
}
WITH_A_DAMAGED_ONE: dict[str, Callable[[Strike], None]] = {"damaged one put aside": _damaged_one_put_aside}
INSTANTS = ON_ALL_RANKS | ON_RANK_0 | WITH_A_DAMAGED_ONE


def several(folder: Path, rank: int, *faults: Fault) -> None:
    """One after the other."""
    for function, arguments in faults:
        function(folder, rank, *arguments)


def signal_in_step(folder: Path, rank: int, step: int, number: int, ranks: Sequence[int]) -> None:
    """Rank 0 sends a signal to `ranks` when the session's step number `step`, from 1, begins."""
    from megalite.training import loop

    begun = 0

    def send() -> None:
        nonlocal begun
        begun += 1
        if rank == 0 and begun == step:
            for other in ranks:
                os.kill(pid_of(folder, other), number)

    _before(loop._TrainingRun, "_begin", send)


def in_evaluation(folder: Path, rank: int, step: int, number: int, ranks: Sequence[int]) -> None:
    """Rank 0 sends a signal to `ranks` in the evaluation after `step`, when a first part of it has been read and a
    checkpoint that was begun before it has been committed."""
    from megalite.training import evaluation

    def strike() -> None:
        deadline = time.monotonic() + 20
        while not (folder / "committed").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for other in sorted(ranks, key=lambda other: other == rank):
            os.kill(pid_of(folder, other), number)
            if number != signal.SIGKILL:
                time.sleep(0.2)  # until the thread that takes signals has it

    from megalite.checkpoint import saver

    commit = saver.commit

    def noted(where: Path, manifest: Any) -> None:
        commit(where, manifest)
        if manifest.step == step:
            (folder / "committed").touch()

    saver.commit = noted
    _before(evaluation._Pace, "next_part", strike, lambda self, *_: rank == 0 and self._step == step)


def failing_evaluation(folder: Path, rank: int, step: int, save_s: float) -> None:
    """The evaluation after `step` fails on rank 1 at once, as where memory is short, and a save takes so long."""
    from megalite.training import evaluation

    def fail() -> None:
        raise RuntimeError("out of memory")

    impatient(folder, rank)
    slow_writer(folder, rank, save_s)
    _before(evaluation._Pace, "next_part", fail, lambda self, *_: rank == 1 and self._step == step)


def slow_writer(folder: Path, rank: int, seconds: float) -> None:
    """A checkpoint takes so much longer to write."""
    from megalite.checkpoint import saver

    _before(saver, "write_blocks", lambda: time.sleep(seconds))


def endless_export(folder: Path, rank: int, patience_s: float) -> None:
    """Exports do not come to an end; a run that is asked to end has so little time for them."""
    from launch.trainer import building, checkpoint_hooks

    program = folder / "endless_export.py"
    program.write_text("import time\ntime.sleep(600)\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    checkpoint_hooks.EXPORT_PROCESS, building.ASKED_TO_END_S = program.stem, patience_s


def failing_writer(folder: Path, rank: int, at_rank: int, save: int) -> None:
    """One input/output error, in the session's save number `save`, from 1."""
    from megalite.checkpoint import writer

    writes = 0

    def fail() -> None:
        nonlocal writes
        writes += 1
        if rank == at_rank and writes == save:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    _before(writer, "write_safetensors", fail)


def small_files(folder: Path, rank: int, at_rank: int, size: int, saves: int) -> None:
    """No file of a rank can grow beyond `size` bytes (the kernel says EFBIG) until it has tried so many saves."""
    from megalite.checkpoint.saver import Saver

    if rank != at_rank:
        return
    whole, tried = Saver.save, 0

    def counted(self: Saver, *arguments: Any) -> float:
        nonlocal tried
        tried += 1
        if tried > saves:
            self.wait()  # the one before still has the limit
            _limit_files(resource.RLIM_INFINITY)
        return whole(self, *arguments)

    Saver.save = counted
    _limit_files(size)


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def full_disk(folder: Path, rank: int, at: str, first: int, last: int) -> None:
    """No byte is free on the disk of the run folder `at` from the session's step number `first` to `last`.

    There is a checkpoint before that.
    """
    from megalite.training import loop

    filler, begun = Path(at) / "filler", 0

    def fill() -> None:
        nonlocal begun
        begun += 1
        if rank == 0 and begun == last + 1:
            filler.unlink()
        elif rank == 0 and first <= begun <= last:
            while not (Path(at) / "checkpoints" / "latest").exists():
                time.sleep(0.01)
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass

    _before(loop._TrainingRun, "_begin", fill)


def clock_jumps_back(folder: Path, rank: int, step: int) -> None:
    """The clock, as our code reads it, is set back by a day when the session's step number `step`, from 1, begins."""
    from megalite.checkpoint import writer
    from megalite.training import loop

    clock, shift, begun = time.time, 0.0, 0

    def count() -> None:
        nonlocal begun, shift
        begun += 1
        shift = DAY_S if begun >= step else 0.0

    class Date(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Date:
            return cls.fromtimestamp(time.time(), tz)

    time.time, writer.datetime = lambda: clock() - shift, Date
    _before(loop._TrainingRun, "_begin", count)


def poisoned(folder: Path, rank: int, sample: int, length: int = 0) -> None:
    """The loss of a micro-batch with `sample` is NaN, whenever and wherever it is computed in sequences this long."""
    from megalite.engine import stages
    from megalite.engine.batch_transfer import BatchTransfer

    losses, copied = stages.head_loss, BatchTransfer._copied
    bad: list[Any] = []  # targets, kept so that no others come to lie where they are

    def noted(self: Any, batch: Any) -> Any:
        moved = copied(self, batch)
        if sample in batch.samples and batch.tokens.shape[1] >= length:
            bad.append(moved.targets)
        return moved

    def spoiled(*arguments: Any) -> Any:
        is_bad = arguments[2].data_ptr() in [targets.data_ptr() for targets in bad]
        return losses(*arguments) * (float("nan") if is_bad else 1.0)

    BatchTransfer._copied, stages.head_loss = noted, spoiled  # type: ignore[method-assign]
