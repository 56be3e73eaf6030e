"""The measurements of one run, read from its folder: how long a step takes, and where its time goes. No torch.

A step is counted without what comes between steps now and then: evaluations, saves and checks of replicas.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

from launch.errors import LaunchError
from launch.inspection.run_files import Facts, RunFiles, known, number
from megalite.config import Config
from megalite.monitor.steps.parts import COMMUNICATION, PARTS

BETWEEN_STEPS = ("evaluation", "checkpoint", "self_check")
MOST_RANKS = 10_000_000  # more is no layout
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class RunMeasurement:
    """The steps of one run after its warm-up."""

    run_dir: Path
    config: Config
    layout: Mapping[str, int]  # its sizes, as in receipt.json
    steps: int  # measured
    step_s: float  # median
    parts_s: Mapping[str, float]  # of a step, mean over ranks; they add up to `step_s`; empty if not recorded
    memory_mib: float | None  # peak of the fullest rank
    predicted_step_s: float | None
    why_rough: str  # why the prediction is; empty where it is not, or there is none

    @classmethod
    def read(cls, run_dir: Path, warm_up: int) -> Self:
        """Reads a run without its first `warm_up` steps; a long run counts with its last ones.

        Raises LaunchError, with what is missing, if it cannot be measured.
        """
        try:
            files = RunFiles.read(run_dir)
        except OSError as error:
            raise LaunchError(f"{run_dir} cannot be read: {error.strerror}") from None
        if files.config is None:
            raise LaunchError(files.problems[0] if files.problems else f"{run_dir} has no config.yaml")
        sizes = {name: number(files.layout.get(name)) or 0.0 for name in PARALLEL_SIZES}
        layout = {name: int(size) for name, size in sizes.items() if 1 <= size <= MOST_RANKS}
        if len(layout) < len(PARALLEL_SIZES):
            raise LaunchError(f"{run_dir} has no receipt.json that names its layout: was it ever started?")
        for name in ("context_parallel_size", "expert_parallel_size"):
            if 1 < (sharing := number(files.layout[name]) or 1) <= MOST_RANKS:
                layout[name] = int(sharing)
        records = files.session_records[warm_up:]
        step_times = [time_s for time_s in known(records, "step_time_s") if time_s > 0]
        if not step_times:
            done = len(files.session_records)
            raise LaunchError(f"{run_dir} has {done} steps, and the first {warm_up} do not count: nothing is measured")
        windows = _windows(records, files.config.monitor.log_interval)
        step_s = statistics.median([sum(one.values()) for one in windows] or step_times)
        peaks = [one.peak_mib for one in files.receipt.measured.ranks if one.peak_mib is not None]
        return cls(
            run_dir,
            files.config,
            layout,
            len(step_times),
            step_s,
            _scaled(windows, step_s),
            max([*peaks, *known(files.records[-1:], "memory_peak_mib")], default=None),
            predicted_s if (predicted_s := files.receipt.prediction.step_time_s or 0.0) > 0 else None,
            files.receipt.prediction.rough,
        )

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(size for name, size in self.layout.items() if name != "expert_parallel_size")

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        return self.config.training.global_batch_size

    @property
    def tokens_per_step(self) -> int:
        """The tokens of the global batch."""
        return self.samples_per_step * self.config.training.sequence_length

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole run."""
        return self.tokens_per_step / self.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the whole run."""
        return self.samples_per_step / self.step_s

    @property
    def communication_share(self) -> float | None:
        """The share of a step in which ranks communicate; None if it was not recorded."""
        return sum(self.parts_s[part] for part in COMMUNICATION) / self.step_s if self.parts_s else None


def _windows(records: Sequence[Facts], interval: int) -> list[dict[str, float]]:
    """Returns seconds by part of each record that has them, of `interval` steps that are all among the records."""
    windows = []
    first = min(known(records, "step"), default=0.0)
    for record in records:
        parts, step = record.get("parts_s"), number(record.get("step"))
        if not isinstance(parts, dict) or step is None or step - interval + 1 < first:
            continue
        found = {name: max(0.0, number(parts.get(name)) or 0.0) for name in PARTS if name not in BETWEEN_STEPS}
        if any(found.values()):
            windows.append(found)
    return windows


def _scaled(windows: Sequence[Mapping[str, float]], step_s: float) -> dict[str, float]:
    """Returns the shares of all windows together, of a step of `step_s`."""
    whole = sum(sum(one.values()) for one in windows)
    return {name: step_s * sum(one[name] for one in windows) / whole for name in windows[0]} if windows else {}
