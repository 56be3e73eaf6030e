"""State of a rank that hangs, or is asked about one, as it writes it for the others.

In: the last records of a rank's activity. Out: JSON of a few kilobytes, and the checked state again on another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megalite.resilience.heartbeat import LARGEST
from megalite.tracing.activity import NOBODY, RING, Note

Ranks = tuple[int, ...]


def _printable(word: str) -> str:
    if not word.isprintable():
        raise ValueError("no printable word")
    return word


def _with_small_numbers(note: Note) -> Note:
    if not all(
        abs(number) < LARGEST
        for number in (note.time, note.phase_number, note.step, note.micro_batch or 0, note.chunk or 0)
    ):
        raise ValueError("a number that no rank writes")
    return note


Number = Annotated[int, Field(ge=0, lt=LARGEST)]
Word = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]


class StrictModel(BaseModel):
    """Base of what a rank writes for the others, and strangers may write in its place."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RankState(StrictModel):
    """State of one rank, which it writes itself."""

    rank: Number
    host: Word
    process: Number
    reason: Word  # a sentence: why it reports a hang; empty if it only answers others
    # oldest first; `time` is seconds ago; only the last one keeps its peers
    notes: tuple[Annotated[Note, AfterValidator(_with_small_numbers)], ...] = Field(min_length=1, max_length=RING)

    @property
    def now(self) -> Note:
        return self.notes[-1]

    def packed(self) -> str:
        """Returns the state as JSON of a few kilobytes, whatever the number of peers."""
        peers = tuple(_runs(sorted(set(self.now.peers))))
        return _PackedState(state=self._with_peers(NOBODY), peers=peers).model_dump_json()

    @classmethod
    def unpacked(cls, text: bytes, world_size: int) -> RankState:
        """Parses what `packed` returned on a rank of `world_size` ranks. Raises ValueError for anything else."""
        found = _PackedState.model_validate_json(text)
        ends = [rank for first, last, _ in found.peers for rank in (first, last)]
        if ends != sorted(ends) or max([found.state.rank, *ends]) >= world_size:
            raise ValueError("no ranks of this run")
        return found.state._with_peers(_ranks(found.peers))

    def _with_peers(self, peers: Ranks) -> RankState:
        return self.model_copy(update={"notes": (*self.notes[:-1], self.now._replace(peers=peers))})


class _PackedState(StrictModel):
    state: RankState  # without peers
    peers: tuple[tuple[Number, Number, Annotated[int, Field(gt=0)]], ...]  # of its last record, as from `_runs`


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns sorted ranks as few (first, last, step); those of a group are evenly spaced."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, last, step = runs[-1] if runs else (rank, rank, 0)
        if runs and (first == last or rank - last == step):
            runs[-1] = (first, rank, rank - last)
        else:
            runs.append((rank, rank, 1))
    return runs


@lru_cache(maxsize=1024)
def _ranks(runs: tuple[tuple[int, int, int], ...]) -> Ranks:
    """Returns the ranks that `_runs` packed."""
    return tuple(rank for first, last, step in runs for rank in range(first, last + 1, step))
