"""Pipeline schedules that exist, drawn at random."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.schedules.passes import Task
from megalite.schedules.tables import Schedule, tasks_of


class DrawnSchedule(NamedTuple):
    """A schedule with sizes that it allows."""

    schedule: Schedule
    stages: int
    micro_batches: int
    chunks: int

    def orders(self) -> list[list[Task]]:
        """The passes of each stage."""
        return [tasks_of(self.schedule, self.stages, s, self.micro_batches, self.chunks) for s in range(self.stages)]


@st.composite
def pipeline_schedules(draw: st.DrawFn, most_stages: int = 6) -> DrawnSchedule:
    schedule = draw(st.sampled_from(Schedule))
    stages = draw(st.integers(1, most_stages))
    chunks = FEWEST_CHUNKS[schedule.value]
    micro_batches = draw(st.integers(1, 4 * stages + 1))
    if schedule is Schedule.INTERLEAVED:
        chunks, micro_batches = draw(st.integers(2, 4)), -(-micro_batches // stages) * stages
    if schedule is Schedule.DUALPIPE_V:
        micro_batches += 2 * stages
    return DrawnSchedule(schedule, stages, micro_batches, chunks)
