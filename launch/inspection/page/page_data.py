"""All that a page about one run is made of, read once. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from launch.errors import LaunchError
from launch.inspection.history import RunHistory
from launch.inspection.run_files import Facts, Receipt, number
from launch.inspection.status import RunStatus
from launch.inspection.step_explanation import StepExplanation, explain_step
from launch.inspection.timelines import KeptStep, read_kept_step, usual_step
from megalite.monitor.steps.parts import PARTS
from megalite.monitor.steps.timeline import step_folder
from megalite.parallel.mesh import Mesh

LARGEST_TIMELINES = 96 << 20  # bytes of all ranks of a step, above which they are not drawn
RECENT = 200  # lines of steps.jsonl that figures of stages are made of
MOST_RANKS = 1 << 17  # of a layout that is believed


@dataclass(frozen=True)
class PageData:
    """The files of a run as the figures need them."""

    history: RunHistory
    status: RunStatus
    kept: KeptStep | None  # the step whose timeline is drawn
    explanation: StepExplanation | None  # of the same step
    problems: tuple[str, ...]  # sentences: what could not be read, and what is lacking

    @classmethod
    def of(
        cls, history: RunHistory, status: RunStatus, step: int | None = None, earlier: PageData | None = None
    ) -> PageData:
        """Adds the timeline of `step`, or of the newest kept one that took no longer than usual, to what was read.

        Of `earlier` findings the timeline is taken over if it is of the same step.
        """
        run_dir, problems = history.run_dir, list(history.problems)
        kept, explanation = None, None
        try:
            step = step if step is not None else usual_step(history)
            if earlier is not None and earlier.kept is not None and earlier.kept.step == step:
                kept, explanation = earlier.kept, earlier.explanation
            else:
                kept = _timeline(run_dir, step)
                problems += kept.problems
                explanation = explain_step(run_dir, kept)
            problems += explanation.problems if explanation is not None else ()
        except (LaunchError, OSError) as error:
            problems.append(str(error))
        return cls(history, status, kept, explanation, tuple(dict.fromkeys(problems)))

    @property
    def receipt(self) -> Receipt:
        return self.history.files.receipt

    @property
    def events(self) -> Sequence[Facts]:
        return self.history.files.events

    @cached_property
    def mesh(self) -> Mesh | None:
        """The layout on record; None if it is unknown or cannot be true."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "context_parallel_size")
        known = [self.history.files.layout.get(name) for name in names]
        sizes = [size for size in known if isinstance(size, int) and 1 <= size <= MOST_RANKS]
        if len(sizes) < len(names):
            return None
        mesh = Mesh(*sizes)
        return mesh if mesh.world_size <= MOST_RANKS else None

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each part of a step, the mean over ranks and all recorded steps; empty if none is on record."""
        recorded = max(1, int(np.count_nonzero(self.history.wall_s)))
        return {name: float(column.sum()) / recorded for name, column in self.history.parts_s.items()}

    @cached_property
    def stages(self) -> dict[int, dict[str, float]]:
        """Seconds of each part of a step by pipeline stage, the mean over `recent_breakdowns`."""
        sums: dict[int, dict[str, float]] = {}
        lines = self.recent_breakdowns
        for line in lines:
            for stage in line["stages"]:
                place, mean_s = (stage.get("stage"), stage.get("mean_s")) if isinstance(stage, dict) else (None, None)
                if isinstance(place, int) and 0 <= place < MOST_RANKS and isinstance(mean_s, dict):
                    of_stage = sums.setdefault(place, dict.fromkeys(PARTS, 0.0))
                    for name in PARTS:
                        of_stage[name] += max(0.0, number(mean_s.get(name)) or 0.0)
        return {stage: {name: s / len(lines) for name, s in parts.items()} for stage, parts in sorted(sums.items())}

    @cached_property
    def recent_breakdowns(self) -> Sequence[Facts]:
        """The last lines of steps.jsonl, at most RECENT, that have as many stages as the last one: a resumed run may
        have cut the model in another way before."""
        found: list[Facts] = []
        for line in reversed(self.history.breakdowns[-RECENT:]):
            if found and len(line["stages"]) != len(found[0]["stages"]):
                break
            found.append(line)
        return found[::-1]

    @property
    def last_breakdown(self) -> Sequence[Facts]:
        """The stages of the last line of steps.jsonl."""
        lines = self.history.breakdowns
        return [stage for stage in lines[-1]["stages"] if isinstance(stage, dict)] if lines else []


def _timeline(run_dir: Path, step: int) -> KeptStep:
    """Reads a step that was kept. Raises LaunchError where it is too large to be drawn, or cannot be read."""
    size = sum(path.stat().st_size for path in step_folder(run_dir, step).glob("rank_*.jsonl"))
    if size > LARGEST_TIMELINES:
        raise LaunchError(f"the timelines of step {step} are too large to be drawn: `megalite trace` reads them")
    return read_kept_step(run_dir, step)


def not_negative(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """Returns those numbers that are known and not negative."""
    return {name: value for name, value in numbers.items() if value is not None and value >= 0}
