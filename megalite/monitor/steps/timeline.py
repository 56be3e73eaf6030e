"""The records of one rank in one step, and their file `timeline/step_00000100/rank_0003.jsonl`. No torch.

The first line of a file says whose it is; each other one is a list: `["note", time, phase_number, phase, operation,
micro_batch, chunk, peers]` or `["collective", began, seconds, axis, operation, bytes, is_wait]`. A note lasts until the
next one, the last one until the step's end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from megalite.checkpoint.durable_files import remove
from megalite.checkpoint.safe_files import check_own_folder, make_folder, read_small_file, write_small_file
from megalite.tracing.activity import Note, Operation, Phase
from megalite.tracing.tape import Collective

FOLDER = "timeline"
LONGEST_BYTES = 64 << 20  # of one rank's file of a step; a full tape takes about 4 MB


class TimedNote(NamedTuple):
    """A note with the end of what it names."""

    start: float  # time.monotonic of its rank
    end: float
    note: Note

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Owner(BaseModel):
    """Whose timeline it is, and the layout of its run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    stage: int
    data: int  # number of its copy of the weights
    tensor: int  # tensor-parallel rank
    host: str
    boot: str  # equal for ranks that share a monotonic clock
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    schedule: str
    chunks: int  # of a stage
    micro_batches: int  # of a replica and step
    context_parallel_size: int = 1
    expert_parallel_size: int = 1

    @property
    def replicas(self) -> int:
        """Copies of the weights."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def sizes(self) -> str:
        """The sizes of its layout, in short."""
        sizes = f"tp{self.tensor_parallel_size} pp{self.pipeline_parallel_size} dp{self.data_parallel_size}"
        more = {"cp": self.context_parallel_size, "ep": self.expert_parallel_size}
        return sizes + "".join(f" {name}{size}" for name, size in more.items() if size > 1)


@dataclass(frozen=True)
class RankTimeline:
    """One rank's window of a step: from the record of the step before to the record of this one."""

    owner: Owner
    step: int
    ended: float  # time.monotonic
    unix: float  # time.time at `ended`
    notes: list[Note]
    collectives: list[Collective]
    is_cut: bool = False  # the step did more than a tape holds
    meetings: dict[int, float] = field(default_factory=dict)  # step -> when this rank left the meeting at its end

    @property
    def began(self) -> float:
        return self.notes[0].time

    def spans(self) -> Iterator[TimedNote]:
        """Yields the notes with their ends, without a gap: together they are the whole window."""
        return spans(self.notes, self.ended)


def spans(notes: list[Note], ended: float) -> Iterator[TimedNote]:
    """Yields `notes` with their ends; the last one ends at `ended`."""
    for one, after in pairwise(notes):
        yield TimedNote(one.time, after.time, one)
    if notes:
        yield TimedNote(notes[-1].time, ended, notes[-1])


def step_folder(run_dir: Path, step: int) -> Path:
    """Returns the folder of a step's timelines."""
    return run_dir / FOLDER / f"step_{step:08d}"


def write_timeline(run_dir: Path, timeline: RankTimeline) -> Path:
    """Writes the timeline of one rank; returns its file. Raises OSError, UnsafeFile where somebody else's file is."""
    path = step_folder(run_dir, timeline.step) / f"rank_{timeline.owner.rank:04d}.jsonl"
    header = _Header(
        owner=timeline.owner,
        step=timeline.step,
        ended=timeline.ended,
        unix=timeline.unix,
        is_cut=timeline.is_cut,
        meetings=list(timeline.meetings.items()),
    )
    lines = [header.model_dump_json()]
    for note in timeline.notes:
        numbers = [note.time, note.phase_number, note.phase, note.operation, note.micro_batch, note.chunk, note.peers]
        lines.append(json.dumps(["note", *numbers]))
    lines += [json.dumps(["collective", *collective]) for collective in timeline.collectives]
    for folder in (run_dir / FOLDER, path.parent):
        make_folder(folder)
    write_small_file(path, ("\n".join(lines) + "\n").encode())
    return path


def steps_of(run_dir: Path) -> list[int]:
    """Returns the steps of which timelines exist, in ascending order."""
    names = [folder.name for folder in (run_dir / FOLDER).glob("step_*") if folder.is_dir()]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def remove_steps(run_dir: Path, steps: Iterable[int]) -> None:
    """Removes the timelines of steps; ignores errors. Raises UnsafeFile if they are not in a folder of the run."""
    check_own_folder(run_dir / FOLDER)
    for step in steps:
        remove(step_folder(run_dir, step))


def read_timeline(path: Path) -> RankTimeline:
    """Returns what is in a file. Raises ValueError, with a sentence that names it, if it is damaged; OSError."""
    lines = read_small_file(path, LONGEST_BYTES).splitlines()
    notes: list[Note] = []
    collectives: list[Collective] = []
    try:
        header = _Header.model_validate_json(lines[0], strict=True)
        for line in lines[1:]:
            kind, *rest = _LINE.validate_json(line)
            if kind == "collective":
                collectives.append(Collective(*rest))
            else:
                time, phase_number, phase, operation, micro_batch, chunk, peers = rest
                notes.append(Note(time, phase_number, header.step, phase, operation, micro_batch, peers, chunk))
    except (ValidationError, IndexError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "it is empty"
        raise ValueError(f"{path} is no timeline ({reason}): remove it") from None
    if not notes:
        raise ValueError(f"{path} holds no record of its rank: remove it")
    return RankTimeline(
        header.owner, header.step, header.ended, header.unix, notes, collectives, header.is_cut, dict(header.meetings)
    )


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    owner: Owner
    step: int
    ended: float
    unix: float
    is_cut: bool
    meetings: list[tuple[int, float]]


_NoteLine = tuple[Literal["note"], FiniteFloat, int, Phase, Operation, int | None, int | None, tuple[int, ...]]
_CollectiveLine = tuple[Literal["collective"], FiniteFloat, FiniteFloat, str, str, int, bool]
_LINE: TypeAdapter[Any] = TypeAdapter(_NoteLine | _CollectiveLine)
