"""Profiles of chosen steps by torch.profiler: `profile/step_20/rank_3.json.gz`, a folder that HTA and Perfetto read.

Beside each trace stands `rank_3.txt` with the operations that took longest; on an accelerator also with how much of the
communication went on beside computation, and, if asked, `rank_3.pickle`, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.checkpoint.durable_files import remove
from megalite.checkpoint.safe_files import (
    check_file_is_safe,
    check_own_folder,
    make_folder,
    open_to_write,
    write_small_file,
)
from megalite.config import Config
from megalite.monitor.observer import Nonfatal

log = logging.getLogger(__name__)

FOLDER = "profile"
REQUEST = "profile_next"  # a file that asks for the next step
LONGEST_TABLE = 40  # operations
MEMORY_EVENTS = 100_000  # allocations and releases of a snapshot, about 1 kB each


class DeviceTime(NamedTuple):
    """Time in which an accelerator did something, in seconds."""

    computation_s: float  # at least one kernel that computes was running
    communication_s: float  # at least one of NCCL
    both_s: float  # one of either kind

    @classmethod
    def of(cls, kernels: Iterable[tuple[str, float, float]]) -> DeviceTime:
        """Takes name, begin and end of each kernel, in microseconds; kernels of several streams overlap."""
        computation: list[tuple[float, float]] = []
        communication: list[tuple[float, float]] = []
        for name, start, end in kernels:
            if not name.startswith(("Memcpy", "Memset")):
                (communication if "nccl" in name.lower() else computation).append((start, end))
        apart = _covered(computation), _covered(communication)
        return cls(*(us / 1e6 for us in (*apart, sum(apart) - _covered(computation + communication))))

    def sentence(self) -> str:
        """Returns what `rank_3.txt` begins with."""
        return (
            f"computation {1000 * self.computation_s:.1f} ms, communication {1000 * self.communication_s:.1f} ms, "
            f"{1000 * self.both_s:.1f} ms of it beside computation"
        )


class StepProfiler:
    """Profiles this rank in the steps of `monitor.profile.steps`, and in those that somebody asks for meanwhile.

    What fails here is reported, and the run goes on.
    """

    def __init__(self, config: Config, rank: int, device_type: str, *, cleans: bool) -> None:
        """`cleans`: this rank removes an earlier profile of the same step, before any rank has ended the step."""
        self._run_dir, self._options = config.run_dir, config.monitor.profile
        self._rank, self._cleans = rank, cleans
        self._is_cuda = device_type == "cuda"
        self._steps = set(self._options.steps)
        self._profile: profile | None = None  # of the current step
        self.is_asked = False  # for the coming step, by somebody who watches the run
        self._opened, self._step = ExitStack(), 0
        self._nonfatal = Nonfatal(log.warning)

    def takes_request(self) -> bool:
        """Returns whether somebody has asked for the next step, on rank 0, and takes the request."""
        if self._rank == 0:
            with self._nonfatal(REQUEST):
                path = self._run_dir / REQUEST
                check_file_is_safe(path)
                with suppress(FileNotFoundError):
                    path.unlink()  # where that fails, each step would be profiled
                    return True
        return False

    def is_due(self, step: int) -> bool:
        """Returns whether the coming step has a profile, for which its result must be read before the next begins."""
        return self.is_asked or step in self._steps

    def begin(self, step: int) -> None:
        """Begins a profile if this step is to have one."""
        is_due, self.is_asked = self.is_due(step), False
        if not is_due:
            return
        with self._nonfatal("a profile"), ExitStack() as opened:
            check_own_folder(self._run_dir / FOLDER)
            if self._cleans:
                remove(self._run_dir / FOLDER / f"step_{step}")
            if self._options.memory:
                opened.callback(torch.cuda.memory._record_memory_history, None)
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            accelerator = [ProfilerActivity.CUDA] if self._is_cuda else []
            self._profile = opened.enter_context(profile(activities=[ProfilerActivity.CPU, *accelerator]))
            opened.enter_context(record_function(f"ProfilerStep#{step}"))  # the name by which HTA knows a step
            self._opened, self._step = opened.pop_all(), step

    def end(self) -> None:
        """Ends the profile of the step, if it has one, and writes its files."""
        if (profiled := self._profile) is None:
            return
        with self._nonfatal("a profile"), tempfile.TemporaryDirectory() as temporary:
            snapshot, trace = Path(temporary) / "memory.pickle", Path(temporary) / "trace.json"
            if self._options.memory:
                torch.cuda.memory._dump_snapshot(str(snapshot))
            self.close()
            folder = self._run_dir / FOLDER / f"step_{self._step}"
            for each in (folder.parent, folder):
                make_folder(each)
            profiled.export_chrome_trace(str(trace))
            with trace.open("rb") as file:
                file.seek(-2, os.SEEK_END)
                if not file.read().strip().endswith(b"}"):  # torch does not tell of a disk that is full
                    raise OSError(f"the profile in {temporary} is cut: is there room?")
            _move(trace, folder / f"rank_{self._rank}.json.gz", compress=True)
            write_small_file(folder / f"rank_{self._rank}.txt", self._summary(profiled).encode())
            if self._options.memory:
                _move(snapshot, folder / f"rank_{self._rank}.pickle", compress=False)
            if self._rank == 0:
                log.info(f"the profile of step {self._step} is in {folder}")
        self.close()

    def close(self) -> None:
        """Ends the profile of the step, if it has one, without files."""
        self._profile = None
        with self._nonfatal("a profile"):
            self._opened.close()

    def _summary(self, profiled: profile) -> str:
        if not self._is_cuda:
            return profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=LONGEST_TABLE)
        kernels = (
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiled.events() or ()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        )
        table = profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=LONGEST_TABLE)
        return f"{DeviceTime.of(kernels).sentence()}\n\n{table}"


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Returns the length of a union of intervals."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _move(source: Path, target: Path, *, compress: bool) -> None:
    """Copies a file to where no stranger's link is followed; leaves no part of one on a disk that is full."""
    with source.open("rb") as data, os.fdopen(open_to_write(target), "wb") as file:
        file.truncate(0)
        try:
            if compress:
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0) as packed:
                    shutil.copyfileobj(data, packed, 1 << 20)
            else:
                shutil.copyfileobj(data, file, 1 << 20)
            file.flush()
        except OSError:
            target.unlink()
            raise
