"""All steps of a run, from the files that it leaves in its folder, without a change in it and without torch.

A run of 200,000 steps is read in seconds: each line of `metrics.jsonl` is parsed once, and its numbers go into columns.
What is missing, cut, of an older version or no number is unknown, and said in a sentence where it matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from launch.inspection.run_files import Facts, RunFiles
from megalite.monitor.line_files import stream_blocks
from megalite.monitor.sinks.jsonl import METRICS, stream_records
from megalite.monitor.sinks.steps import STEPS
from megalite.monitor.steps.parts import PARTS

Column = np.ndarray  # [steps] of float64, NaN where a step has no such number
LARGEST_BYTES = 384 << 20  # of metrics.jsonl; in a larger one lines are left out at even distances
STEPS_BYTES = 8 << 20  # at the end of steps.jsonl
MOST_COLUMNS = 128
MOST_NUMBERS = 1 << 25  # a quarter of a gigabyte
MOST_SOURCES = 12  # of a mix, those with the most targets first: as many as a chart has colours
LARGEST_NUMBER = 1e18  # as `files.number`
RARE = (b'"evaluation_loss"', b'"evaluation_s"')  # of few steps: their lines are never left out
PARTS_PREFIX = "parts_s/"
SOURCES = "source_losses"


@dataclass(frozen=True)
class RunHistory:
    """The steps of a run, one each: of one that was done again, as it was written last. Read it with `read`."""

    run_dir: Path
    files: RunFiles  # config, receipt, events, and the last steps as they were written
    columns: Mapping[
        str, Column
    ]  # by the names in metrics.jsonl; nested ones as `parts_s/forward`, `source_losses/web`
    breakdowns: Sequence[Facts]  # the last lines of steps.jsonl
    problems: tuple[str, ...]  # sentences: what could not be read

    @classmethod
    def read(cls, run_dir: Path) -> RunHistory:
        """Reads the folder of a run; anything but the steps and events themselves may be missing or damaged.

        Raises OSError where these exist and cannot be read.
        """
        files = RunFiles.read(run_dir)
        problems = list(files.problems)
        columns = read_columns(run_dir / METRICS, problems)
        for losses in (columns[name] for name in ("loss", "evaluation_loss") if name in columns):
            losses[losses == 0] = np.nan  # of samples without a target, which have no loss
        breakdowns = _breakdowns(run_dir / STEPS, problems)
        return cls(run_dir, files, columns, breakdowns, tuple(problems))

    @property
    def steps(self) -> Column:
        """The numbers of the steps, in ascending order."""
        return self.columns["step"]

    def column(self, name: str) -> Column:
        """Returns the numbers of that name; all are NaN if no step has one."""
        found = self.columns.get(name)
        return np.full(len(self.steps), np.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Returns whether any step has a number of that name."""
        return name in self.columns and bool(np.isfinite(self.columns[name]).any())

    @property
    def source_losses(self) -> dict[str, Column]:
        """The training loss of each source of a mix, or of those that have given most, sorted by name."""
        names = sorted(name for name in self.columns if name.startswith(f"{SOURCES}/"))
        return {name.removeprefix(f"{SOURCES}/"): self.columns[name] for name in names}

    @cached_property
    def parts_s(self) -> dict[str, Column]:
        """Seconds of each part of the step, in the order of `PARTS`; empty for a run that did not record them."""
        names = [name for name in PARTS if self.has(PARTS_PREFIX + name)]
        return {name: np.nan_to_num(self.columns[PARTS_PREFIX + name]).clip(min=0.0) for name in names}

    @cached_property
    def wall_s(self) -> Column:
        """Seconds of each step's parts together; 0 for a step that has none on record."""
        return np.sum([np.zeros(len(self.steps)), *self.parts_s.values()], axis=0)

    @cached_property
    def elapsed_s(self) -> Column:
        """Seconds since the run's first step began, with the pauses between its sessions.

        Never falls: where the clock jumped back, the step's own duration counts.
        """
        if not len(self.steps):
            return np.zeros(0)
        own = np.nan_to_num(self.column("step_time_s")).clip(min=0.0)
        gaps = np.diff(self.column("time"), prepend=np.nan)
        gaps = np.where(gaps >= 0, gaps, own)
        return np.cumsum(gaps)


def read_columns(path: Path, problems: list[str]) -> dict[str, Column]:
    """Returns the numbers of all steps by name, `step` always among them; adds sentences to `problems`.

    Raises OSError where the file exists and cannot be read.
    """
    found = StepColumns()
    if path.is_file():  # nor a named pipe, which would be waited for
        every = 1 + path.stat().st_size // LARGEST_BYTES
        for block in stream_blocks(path, every=every, always=RARE):
            found.add(block)
        if found.is_thinned:
            problems.append(f"{path} holds many numbers: of its older steps not all are drawn")
        if every > 1:
            problems.append(f"{path} is large: one line of {every} was read")
    return found.by_step()


class StepColumns:
    """Collects the numbers of records, block by block."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[Column]] = {"step": []}
        self._sources: list[str] = []
        self._length = 0
        self.is_thinned = False  # some steps have been left out

    def add(self, records: Sequence[Facts]) -> None:
        """Takes the numbers of records; one without a step is left out."""
        steps = _numbers([record.get("step") for record in records])
        usable = np.zeros(len(records), bool) if steps is None else (steps >= 1) & (steps == np.floor(steps))
        if not usable.all():
            records = [record for record, is_usable in zip(records, usable, strict=True) if is_usable]
        if not records:
            return
        if self._length * len(self._blocks) > MOST_NUMBERS:
            self._thin_out()
        for name in sorted(set().union(*records)):
            if name not in ("parts_s", SOURCES):
                self._put(str(name), _values(records, name))
        if any("parts_s" in record for record in records):
            parts = [one if isinstance(one := record.get("parts_s"), dict) else {} for record in records]
            for name in PARTS:
                self._put(PARTS_PREFIX + name, _values(parts, name))
        losses = [one if isinstance(one := record.get(SOURCES), dict) else {} for record in records]
        if any(losses):
            self._choose_sources(records)
            for name in self._sources:
                self._put(f"{SOURCES}/{name}", _values(losses, name))
        self._length += len(records)

    def _thin_out(self) -> None:
        """Leaves out every second step, of those without an evaluation if these are the most."""
        columns = self.by_step()
        kept = np.arange(len(columns["step"])) % 2 == 0
        evaluated = np.isfinite(columns.get("evaluation_loss", np.full(len(kept), np.nan)))
        if evaluated.mean() < 0.25:
            kept |= evaluated
        self._blocks = {name: [column[kept]] for name, column in columns.items()}
        self._length, self.is_thinned = int(kept.sum()), True

    def _choose_sources(self, records: Sequence[Facts]) -> None:
        """Adds sources with targets in these records, until there are `MOST_SOURCES`."""
        targets: Counter[str] = Counter()
        for record in records if len(self._sources) < MOST_SOURCES else ():
            if isinstance(of_record := record.get("source_targets"), dict):
                targets.update({name: int(_number(value)) for name, value in of_record.items() if _number(value) > 0})
        new = [name for name, _ in targets.most_common() if name not in self._sources]
        self._sources += new[: MOST_SOURCES - len(self._sources)]

    def _put(self, name: str, values: list[Any]) -> None:
        if name not in self._blocks and len(self._blocks) >= MOST_COLUMNS:
            return
        column = _numbers(values)
        if column is None:
            return
        blocks = self._blocks.setdefault(name, [])
        known = sum(map(len, blocks))
        if known < self._length:
            blocks.append(np.full(self._length - known, np.nan))
        blocks.append(column)

    def by_step(self) -> dict[str, Column]:
        """Returns the columns in the order of steps; of each step the record that was written last."""
        columns = {}
        for name, blocks in self._blocks.items():
            column = np.concatenate(blocks) if blocks else np.zeros(0)
            columns[name] = np.pad(column, (0, self._length - len(column)), constant_values=np.nan)
            self._blocks[name] = [columns[name]]  # for who adds more, block by block, and asks again
        backwards = columns["step"][::-1]
        _, first = np.unique(backwards, return_index=True)
        kept = len(backwards) - 1 - first
        return {name: column[kept] for name, column in columns.items()}


def _values(records: Sequence[Facts], name: str) -> list[Any]:
    """Returns the value of that name in each record, None where there is none; mostly all have one."""
    try:
        return [record[name] for record in records]
    except KeyError:
        return [record.get(name) for record in records]


def _numbers(values: list[Any]) -> Column | None:
    """Returns the values as numbers, NaN where one is none or too large; None if none is a number."""
    try:
        column = np.array(values, dtype=np.float64)
        if column.ndim != 1:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        column = np.array([_number(value) for value in values])
    column[~(np.abs(column) < LARGEST_NUMBER)] = np.nan
    return column if not np.isnan(column).all() else None


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and abs(value) < LARGEST_NUMBER
    return float(value) if is_number else np.nan


def _breakdowns(path: Path, problems: list[str]) -> list[Facts]:
    """Returns the last lines of steps.jsonl that have what every version of it has."""
    try:
        lines = list(stream_records(path, STEPS_BYTES))
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror or error}")
        return []
    return [line for line in lines if isinstance(line.get("stages"), list)]
