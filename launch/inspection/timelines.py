"""The timelines that a run has kept, as far as they can be read. No torch.

A file may be missing, cut, damaged or of an older start with another layout: the others are used, and a sentence says
what is lacking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path

import numpy as np

from launch.errors import LaunchError
from launch.inspection.history import RunHistory
from launch.inspection.run_files import LATEST_S
from megalite.monitor.steps.alignment import AlignedStep, align
from megalite.monitor.steps.timeline import Owner, RankTimeline, read_timeline, step_folder, steps_of

BACKWARDS_S = 1e-3  # by which times of a device may go back where they are put together from several clocks
MOST_RANKS = 1 << 20  # of a layout that is believed
LONG = 1.5  # times the median step: there is more in it than in others
BESIDE = ("evaluation", "self_check", "checkpoint")
MOST_BESIDE = 0.1  # of a step, above which these make it an unusual one
LEAST_STEP = 10  # before which steps warm up
SHOWN_PROBLEMS = 3  # of damaged files


@dataclass(frozen=True)
class KeptStep:
    """A step as its ranks recorded it."""

    step: int
    aligned: AlignedStep
    problems: tuple[str, ...]  # sentences: what is lacking


def newest_step(run_dir: Path) -> int:
    """Returns the newest step of which timelines exist. Raises LaunchError where there are none."""
    return _kept(run_dir)[-1]


def usual_step(history: RunHistory) -> int:
    """Returns the newest step with a timeline that neither an evaluation nor a save made long, else the newest one.

    Raises LaunchError where no step has one.
    """
    newest, wall_s = newest_step(history.run_dir), history.wall_s
    if not (wall_s > 0).any():
        return newest
    usual_s = LONG * float(np.median(wall_s[wall_s > 0]))
    kept = steps_of(history.run_dir)
    nothing = np.zeros(len(wall_s))
    beside_s = np.sum([history.parts_s.get(part, nothing) for part in BESIDE], axis=0)
    is_usual = np.isin(history.steps, kept) & (wall_s > 0) & (wall_s <= usual_s) & (history.steps >= LEAST_STEP)
    is_usual &= beside_s <= MOST_BESIDE * wall_s
    return int(history.steps[is_usual][-1]) if is_usual.any() else newest


def check_kept(run_dir: Path, step: int) -> None:
    """Raises LaunchError, with the nearest steps that are, where a step was not kept."""
    kept = _kept(run_dir)
    if step in kept:
        return
    before, after = [each for each in kept if each < step], [each for each in kept if each > step]
    nearest = [*before[-1:], *after[:1]]
    is_one = len(nearest) == 1
    raise LaunchError(
        f"{run_dir} has kept no timeline of step {step}: the nearest {'is' if is_one else 'are'} "
        f"{' and '.join(map(str, nearest))}; monitor.timeline.steps [{step}] keeps it"
    )


def steps_between(run_dir: Path, first: int, last: int) -> list[int]:
    """Returns the kept steps from `first` to `last`. Raises LaunchError where there are none."""
    kept = _kept(run_dir)
    if found := [step for step in kept if first <= step <= last]:
        return found
    raise LaunchError(
        f"{run_dir} has kept no timeline of steps {first} to {last}: there are those of {format_numbers(kept)}"
    )


def read_kept_step(run_dir: Path, step: int) -> KeptStep:
    """Reads the timelines of all ranks. Raises LaunchError where none can be read."""
    found, problems = [], []
    for path in sorted(step_folder(run_dir, step).glob("rank_*.jsonl")):
        try:
            found.append(_checked(read_timeline(path), path))
        except (ValueError, OSError) as error:
            problems.append(str(error) if isinstance(error, ValueError) else f"{path} cannot be read: {error}")
    if not found:
        why = problems[0] if problems else f"{step_folder(run_dir, step)} is empty"
        raise LaunchError(f"no timeline of step {step} can be read: {why}")
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"{len(problems) - SHOWN_PROBLEMS} more files of step {step} cannot be read"]
    newest = max(found, key=lambda timeline: timeline.unix).owner
    alike = {each.owner.rank: each for each in found if _layout(each.owner) == _layout(newest)}
    aligned = align(alike.values())
    return KeptStep(step, aligned, (*problems, *_lacking(step, aligned, len(found))))


def _kept(run_dir: Path) -> list[int]:
    if kept := steps_of(run_dir):
        return kept
    raise LaunchError(
        f"{run_dir} has no timelines: a run keeps those of steps 10, 11, 100, 101, ... and of its last one, and of "
        "those that monitor.timeline.steps or monitor.timeline.every name"
    )


def _checked(timeline: RankTimeline, path: Path) -> RankTimeline:
    """Returns a timeline whose records are in the order of time. Raises ValueError where it cannot be true."""
    owner = timeline.owner
    sizes = (owner.tensor_parallel_size, owner.pipeline_parallel_size, owner.replicas)
    where = (owner.tensor, owner.stage, owner.data)
    is_inside = all(0 <= place < size for place, size in zip(where, sizes, strict=True))
    world = sizes[0] * sizes[1] * sizes[2]
    if not (is_inside and 0 <= owner.rank < world <= MOST_RANKS and owner.chunks > 0 and owner.micro_batches > 0):
        raise ValueError(f"{path} names a rank or a stage that its own layout does not have: remove it")
    times = (timeline.ended, timeline.unix, *(note.time for note in timeline.notes), *timeline.meetings.values())
    if max(map(abs, (*times, *(number for each in timeline.collectives for number in each[:2])))) > LATEST_S:
        raise ValueError(f"{path} has a time that no clock shows: remove it")
    notes, latest = [], timeline.began
    for note in timeline.notes:
        if note.time < latest - BACKWARDS_S:
            raise ValueError(f"{path} has times that go backwards: remove it")
        latest = max(latest, note.time)
        notes.append(note if note.time == latest else note._replace(time=latest))
    if timeline.ended < latest - BACKWARDS_S or any(each.seconds < -BACKWARDS_S for each in timeline.collectives):
        raise ValueError(f"{path} has times that go backwards: remove it")
    collectives = [each._replace(seconds=max(0.0, each.seconds)) for each in timeline.collectives]
    return replace(timeline, notes=notes, collectives=collectives, ended=max(timeline.ended, latest))


def _lacking(step: int, aligned: AlignedStep, read: int) -> Iterable[str]:
    """Yields a sentence for each thing that keeps the step from being whole."""
    timelines = aligned.timelines
    sizes = aligned.first.owner
    world = sizes.tensor_parallel_size * sizes.pipeline_parallel_size * sizes.replicas
    if read > len(timelines):
        yield f"step {step}: {read - len(timelines)} files are of an earlier start with another layout, and left out"
    if missing := [rank for rank in range(world) if rank not in timelines]:
        yield f"step {step}: there is no timeline of ranks {format_numbers(missing)} of {world}"
    if cut := [rank for rank, timeline in timelines.items() if timeline.is_cut]:
        yield f"step {step}: ranks {format_numbers(cut)} did more than is recorded of a step, whose end is missing"
    if aligned.unmet:
        yield (
            f"step {step}: the clocks of {', '.join(sorted(aligned.unmet))} are compared by the time of day, because "
            "no common meeting is recorded: they may be milliseconds off"
        )


def _layout(owner: Owner) -> tuple[object, ...]:
    return owner.sizes, owner.schedule, owner.chunks, owner.micro_batches


def format_numbers(numbers: Sequence[int]) -> str:
    """Returns ascending numbers with ranges, as `0-3, 7`."""
    counter = count()
    ranges = [list(each) for _, each in groupby(numbers, key=lambda number: number - next(counter))]
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges)
