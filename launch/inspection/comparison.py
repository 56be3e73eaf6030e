"""Compares runs step by step: where their losses part, which is faster, which parts of a step differ, which options do.

Two runs have to agree if they learned from the same samples, from the same first weights, by the same rule: then the
layout alone differs, and with it only rounding. Pure arithmetic on what `RunHistory` has read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from launch.checkpoints.summary import sizes_text
from launch.inspection.history import Column, RunHistory
from launch.inspection.run_files import number
from megalite.checkpoint.manifest import printable
from megalite.config import Config
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.units import plural

TOLERANCE = {"fp32": 2e-3, "fp16": 1e-2, "bf16": 1e-2}
"""Largest difference of two losses, relative to the larger one, that layouts explain, by the coarser format of both.

Layouts of one training part by rounding, which grows from step to step; docs/observing.md has measured figures.
"""
SPIKE = 8.0  # gradient norm over its median so far, beyond which a step magnifies differences of rounding
RECENT = 200  # steps of that median
SETTLED = 5  # steps at the start that no speed is measured in: they warm up
MISSING = "(unknown)"
SAME_RULE = ("model.", "optimizer.", "training.gradient_clipping.", "training.initialize_from.")
"""Options that change what is learned. Batch, seed, data and learning rates are compared as the run recorded them."""
FREE = ("run_dir", "monitor.wandb.name")  # differ between any two runs


@dataclass(frozen=True)
class StepDifference:
    """Two runs' values of one number at one step."""

    step: int
    first: float
    second: float
    relative: float  # to the larger of both; infinite where only one is a number


@dataclass(frozen=True)
class OptionDifference:
    """The values of an option that is not the same in all runs, as YAML would have them; MISSING where unknown."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class ComparedRun:
    """A run as comparisons see it. Speeds are medians without the first steps; unknown facts are None.

    Layout, speeds and parts are those of the last session, which may have resumed on another layout.
    """

    name: str
    history: RunHistory
    layout: str | None
    dtype: str | None
    step_s: float | None  # from the start of a step to its end
    tokens_per_second: float | None
    parts_s: Mapping[str, float]  # of a step, the mean without the first steps; empty if not recorded

    @classmethod
    def of(cls, name: str, history: RunHistory) -> ComparedRun:
        """Sums up a run."""
        config = history.files.config
        dtype = config.precision.dtype if config is not None else None
        begun = number(history.files.session[0].get("step")) if history.files.session else None
        last = history.steps > (begun or 0)
        last = last if last.any() else np.ones_like(last)
        return cls(
            printable(name),
            history,
            sizes_text(history.files.layout, dtype) if history.files.layout else None,
            dtype,
            _median(history.column("step_time_s")[last]),
            _median(history.column("tokens_per_second")[last]),
            {part: float(np.mean(_settled(column))) for part, column in _recorded_parts(history, last)},
        )

    @property
    def last_step(self) -> int:
        """The last step on record; 0 if there is none."""
        return int(self.history.steps[-1]) if len(self.history.steps) else 0

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of its config by their dotted names; empty if it cannot be read."""
        config = self.history.files.config
        return {} if config is None else dict(_flat("", without_secrets(config.model_dump(mode="json"))))

    def states(self, option: str) -> bool:
        """Returns whether its config gives an option another value than what would follow from the others."""
        config, place = self.history.files.config, option.split(".")
        if config is None or option not in self.options:
            return False
        values = config.model_dump(mode="json")
        return without_secrets(default_of(values, place)) != self.options[option]

    def last(self, name: str) -> float | None:
        """Returns the newest number of that name."""
        column = self.history.column(name)
        known = column[np.isfinite(column)]
        return float(known[-1]) if len(known) else None


@dataclass(frozen=True)
class PairComparison:
    """A run against the first one."""

    first: ComparedRun
    second: ComparedRun
    tolerance: float
    obstacles: tuple[str, ...]  # sentences: why the losses need not agree; none if they have to
    steps: int  # at which both have a loss
    beyond: StepDifference | None  # the first loss beyond the tolerance
    largest: StepDifference | None  # of the losses
    evaluation: StepDifference | None  # the largest of the held-out losses
    gradient_norm: StepDifference | None  # the largest
    spike: StepDifference | None  # of gradient norms, before `beyond`: it magnifies rounding
    notes: tuple[str, ...]  # sentences

    @property
    def agrees(self) -> bool:
        """True if the losses of both are within the tolerance, at one step at least."""
        return self.steps > 0 and self.beyond is None

    @property
    def fails(self) -> bool:
        """True if both should agree and do not, or nothing shows that they do."""
        return not self.obstacles and not self.agrees

    @property
    def step_speed(self) -> float | None:
        """Steps of the second in the time of one of the first; above 1: the second is faster."""
        return _ratio(self.first.step_s, self.second.step_s)

    @property
    def token_speed(self) -> float | None:
        """Tokens of the second in the time of one of the first."""
        return _ratio(self.second.tokens_per_second, self.first.tokens_per_second)


@dataclass(frozen=True)
class Comparison:
    """Runs, all held against the first of them."""

    runs: tuple[ComparedRun, ...]
    pairs: tuple[PairComparison, ...]
    options: tuple[OptionDifference, ...]

    @property
    def fails(self) -> bool:
        """True if a run should agree with the first one and does not."""
        return any(pair.fails for pair in self.pairs)

    @property
    def parts(self) -> dict[str, tuple[float | None, ...]]:
        """Mean seconds of the parts of a step in each run, the most different first."""
        names = dict.fromkeys(name for run in self.runs for name in run.parts_s)
        found = {name: tuple(run.parts_s.get(name) for run in self.runs) for name in names}

        def spread(name: str) -> float:
            known = [seconds or 0.0 for seconds in found[name]]
            return max(known) - min(known)

        return {name: found[name] for name in sorted(found, key=spread, reverse=True)}


def compare(histories: Mapping[str, RunHistory], tolerance: float | None = None) -> Comparison:
    """Compares at least two runs, by name. Without `tolerance` that of the runs' number formats is taken."""
    runs = tuple(ComparedRun.of(name, history) for name, history in histories.items())
    first, *others = runs
    return Comparison(runs, tuple(_pair(first, other, tolerance) for other in others), tuple(differing_options(runs)))


def differing_options(runs: Sequence[ComparedRun]) -> Iterator[OptionDifference]:
    """Yields the options that are not the same in all runs whose config is known, in the order of the config."""
    known = [run.options for run in runs if run.options]
    for name in dict.fromkeys(name for options in known for name in options):
        if name in FREE or all(options.get(name, MISSING) == known[0].get(name, MISSING) for options in known):
            continue
        if any(run.states(name) for run in runs):
            yield OptionDifference(name, tuple(run.options.get(name, MISSING) for run in runs))


def relative_differences(first: RunHistory, second: RunHistory, name: str) -> tuple[Column, Column]:
    """Returns the steps that both have with that number, and how far the numbers are apart, relative to the larger."""
    at, left, right = _common(first, second, name)
    return at, _relative(left, right)


def _pair(first: ComparedRun, second: ComparedRun, tolerance: float | None) -> PairComparison:
    if tolerance is None:  # a format that is not known counts as fp32
        tolerance = max(TOLERANCE.get(run.dtype or "", TOLERANCE["fp32"]) for run in (first, second))
    at, left, right = _common(first.history, second.history, "loss")
    relative = _relative(left, right)
    outside = np.flatnonzero(relative > tolerance)
    beyond = _difference(at, left, right, relative, int(outside[0])) if len(outside) else None
    return PairComparison(
        first,
        second,
        tolerance,
        tuple(_obstacles(first, second)),
        len(at),
        beyond,
        _largest(at, left, right),
        _largest(*_common(first.history, second.history, "evaluation_loss")),
        _largest(*_common(first.history, second.history, "grad_norm")),
        _spike_before(first, second, beyond.step) if beyond is not None else None,
        tuple(_notes(first, second, len(at))),
    )


def _common(first: RunHistory, second: RunHistory, name: str) -> tuple[Column, Column, Column]:
    """Returns the steps at which one run or both have a number and both a record, and the numbers of both."""
    steps, in_first, in_second = np.intersect1d(first.steps, second.steps, assume_unique=True, return_indices=True)
    left, right = first.column(name)[in_first], second.column(name)[in_second]
    both_know = np.isfinite(left) & np.isfinite(right)
    # a step without a loss is one whose loss was not finite, but evaluations may be at other steps
    kept = np.isfinite(left) | np.isfinite(right) if name == "loss" else both_know
    return steps[kept], left[kept], right[kept]


def _relative(left: Column, right: Column) -> Column:
    """Returns |a - b| / max(|a|, |b|), infinite where only one is a number."""
    scale = np.maximum(np.abs(left), np.abs(right))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(left == right, 0.0, np.abs(left - right) / scale)
    return np.where(np.isfinite(relative), relative, np.inf)


def _difference(at: Column, left: Column, right: Column, relative: Column, place: int) -> StepDifference:
    return StepDifference(int(at[place]), float(left[place]), float(right[place]), float(relative[place]))


def _largest(at: Column, left: Column, right: Column) -> StepDifference | None:
    if not len(at):
        return None
    relative = _relative(left, right)
    return _difference(at, left, right, relative, int(np.argmax(relative)))


def _spike_before(first: ComparedRun, second: ComparedRun, step: int) -> StepDifference | None:
    """Returns the gradient norms of both runs at the first one's largest until a step, if it is far above the median
    before it."""
    at, left, right = _common(first.history, second.history, "grad_norm")
    before = at <= step
    if before.sum() < SETTLED:
        return None
    at, left, right = at[before][-RECENT:], left[before][-RECENT:], right[before][-RECENT:]
    place = int(np.argmax(left))
    if place == 0 or left[place] < SPIKE * float(np.median(left[:place])):
        return None
    return _difference(at, left, right, _relative(left, right), place)


def _obstacles(first: ComparedRun, second: ComparedRun) -> Iterator[str]:
    """Yields why the losses of two runs need not agree."""
    for fact, what in {"data_fingerprint": "learned from other data", "seed": "have other seeds"}.items():
        left, right = (getattr(run.history.files.receipt, fact) for run in (first, second))
        unknown = [run.name for run, value in ((first, left), (second, right)) if value is None]
        if unknown:
            yield f"the {fact.replace('_', ' ')} of {' and '.join(unknown)} is not known"
        elif left != right:
            yield f"they {what}" + (f", {left} and {right}" if fact == "seed" else "")
    columns = {"tokens_seen": "have seen other numbers of tokens", "learning_rate": "learn at other rates"}
    for column, what in columns.items():
        at, left, right = _common(first.history, second.history, column)
        apart = np.flatnonzero(_relative(left, right) > 1e-9)
        if len(apart):
            place = int(apart[0])
            yield f"they {what} from step {int(at[place]):,} on ({left[place]:g} and {right[place]:g})"
    rule = [one.name for one in differing_options((first, second)) if f"{one.name}.".startswith(SAME_RULE)]
    if rule:
        yield f"they do not learn by the same rule: {', '.join(rule)}"


def _notes(first: ComparedRun, second: ComparedRun, steps: int) -> Iterator[str]:
    """Yields what else must be known to read the comparison."""
    for run in (first, second):
        if not len(run.history.steps):
            yield f"{run.name} has made no step"
            continue
        starts = [event for event in run.history.files.events if event["event"] == "started" and event.get("step")]
        if starts:
            yield (
                f"{run.name} was resumed {plural(len(starts), 'time')}: of a step that was done twice the last counts, "
                "and layout, speed and parts of a step are those of the last session"
            )
    last = (first.last_step, second.last_step)
    if min(last) and last[0] != last[1]:
        yield f"{first.name} has {last[0]:,} steps and {second.name} {last[1]:,}: {steps:,} are compared"
    elif min(last) and not steps:
        yield f"{first.name} and {second.name} have no step in common"
    skips = [int(np.nansum(run.history.column("skipped") > 0)) for run in (first, second)]
    if skips[0] != skips[1]:
        yield f"{first.name} skipped {skips[0]:,} steps, {second.name} {skips[1]:,}"


def _median(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(np.median(_settled(known))) if len(known) else None


def _settled(column: Column) -> Column:
    """Returns the numbers of the steps that are no longer warming up."""
    return column[SETTLED:] if len(column) > 2 * SETTLED else column[int(len(column) > 2) :]


def _recorded_parts(history: RunHistory, chosen: NDArray[np.bool_]) -> Iterator[tuple[str, Column]]:
    """Yields the parts of those of the chosen steps that recorded them."""
    wall = history.column("wall_s")
    recorded = np.isfinite(wall) & (wall > 0) & chosen
    for part, column in history.parts_s.items():
        if recorded.any() and column[recorded].any():
            yield part, column[recorded]


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below and math.isfinite(above / below) else None


def default_of(values: Mapping[str, Any], place: Sequence[str]) -> Any:
    """Returns the value that an option of a config would have without being set; None if it has to be."""
    left = copy.deepcopy(dict(values))
    section = left
    for name in place[:-1]:
        section = section[name]
    del section[place[-1]]
    try:
        found: Any = Config.model_validate(left).model_dump(mode="json")
    except ValidationError:
        return None
    for name in place:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from _flat(name, value)
        else:
            yield name, value
