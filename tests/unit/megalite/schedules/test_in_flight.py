"""Micro-batches that stages hold at once, by the tables that the engine runs."""

from __future__ import annotations

import pytest
from hypothesis import given

from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.schedules.in_flight import MOST_LOOKED_AT, moments_of, most_in_flight
from megalite.schedules.simulation import PipelineTimes, simulate_schedule
from megalite.schedules.tables import Schedule
from tests.helpers.pipeline_schedules import DrawnSchedule, pipeline_schedules


@given(pipeline_schedules())
def test_both_kinds_together_are_the_peak_of_the_simulation(drawn: DrawnSchedule) -> None:
    """Which counts a micro-batch until its weight gradient."""
    times = PipelineTimes([1.0] * drawn.stages, [2.0] * drawn.stages)
    peaks = simulate_schedule(drawn.schedule, times, drawn.micro_batches, drawn.chunks).peak_in_flight
    for stage, peak in enumerate(peaks):
        moments = most_in_flight(drawn.schedule, drawn.stages, stage, drawn.micro_batches, drawn.chunks)
        assert max(moment.total for moment in moments) == peak


def test_1f1b_keeps_p_minus_s_and_zero_bubble_postpones_the_rest() -> None:
    """Narayanan 2021; ZB-H1's stage s is s weight gradients behind (Qi 2023), and one more while it computes both."""
    for stage in range(4):
        (one,) = most_in_flight(Schedule.ONE_F_ONE_B, 4, stage, 16, 1)
        assert (one.whole, one.postponed) == ((4 - stage,), (0,))
        moments = most_in_flight(Schedule.ZERO_BUBBLE, 4, stage, 16, 1)
        assert max(moment.whole for moment in moments) == (4 - stage,)
        assert max(moment.postponed for moment in moments) == (stage + 1,)


@pytest.mark.parametrize("schedule", Schedule)
def test_a_longer_step_holds_no_more(schedule: Schedule) -> None:
    for stages in (1, 2, 3, 5):
        for stage in range(stages):
            looked_at, longer = (
                moments_of(schedule, stages, stage, factor * stages, FEWEST_CHUNKS[schedule.value])
                for factor in (MOST_LOOKED_AT, 4 * MOST_LOOKED_AT)
            )
            assert looked_at == longer
