"""Pipeline schedules, simulated: each task once, none too early, and the bubbles that the papers print."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.simulation import equal_stages
from megalite.config import ConfigError
from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.schedules.drawing import draw, legend
from megalite.schedules.passes import PassKind
from megalite.schedules.simulation import PipelineTimes, Timeline, bubble_closed_form, simulate_schedule
from megalite.schedules.tables import Schedule, placement, position_of
from tests.helpers.pipeline_schedules import pipeline_schedules

SECONDS = st.floats(0.01, 10)


@st.composite
def timelines(draw_one: st.DrawFn) -> tuple[Timeline, PipelineTimes]:
    """Any schedule, with stages that differ."""
    schedule, stages, micro_batches, chunks = draw_one(pipeline_schedules())
    forward = draw_one(st.lists(SECONDS, min_size=stages, max_size=stages))
    backward = draw_one(st.lists(SECONDS, min_size=stages, max_size=stages))
    weight_part = draw_one(st.floats(0, 1))
    times = PipelineTimes(forward, backward, draw_one(st.floats(0, 3)), [weight_part * each for each in backward])
    return simulate_schedule(schedule, times, micro_batches, chunks), times


@given(timelines())
def test_a_stage_does_one_thing_at_a_time_for_as_long_as_it_takes(drawn: tuple[Timeline, PipelineTimes]) -> None:
    timeline, times = drawn
    for stage in range(timeline.stages):
        mine = [work for work in timeline.work if work.stage == stage]
        assert all(earlier.end_s <= later.start_s for earlier, later in pairwise(mine))
        alone_s = timeline.micro_batches * (times.forward_s[stage] + times.backward_s[stage])
        assert timeline.busy_s[stage] == pytest.approx(alone_s)
    assert timeline.makespan_s >= max(timeline.busy_s) * (1 - 1e-12)


@given(timelines())
def test_nothing_starts_before_what_it_needs_has_arrived(drawn: tuple[Timeline, PipelineTimes]) -> None:
    timeline, times = drawn
    where = placement(timeline.schedule, timeline.stages, timeline.chunks)
    starts, ends = {}, {}  # a whole backward as its input gradient
    for work in timeline.work:
        position = position_of(timeline.schedule, timeline.stages, work.stage, work.chunk)
        kind = PassKind.INPUT_GRADIENT if work.kind is PassKind.BACKWARD else work.kind
        starts[kind, position, work.micro_batch], ends[kind, position, work.micro_batch] = work.start_s, work.end_s
    for (kind, position, micro_batch), start_s in starts.items():
        if kind is PassKind.FORWARD:
            needs = [(PassKind.FORWARD, position - 1)] * (position > 0)
        elif kind is PassKind.WEIGHT_GRADIENT:
            needs = [(PassKind.INPUT_GRADIENT, position)]
        else:
            needs = [(PassKind.FORWARD, position)] + [(kind, position + 1)] * (position < len(where) - 1)
        for needed_kind, needed_position in needs:
            away_s = times.between_stages_s if where[needed_position] != where[position] else 0.0
            assert start_s >= ends[needed_kind, needed_position, micro_batch] + away_s - 1e-9


@given(st.integers(1, 12), st.integers(1, 30), SECONDS, SECONDS)
def test_1f1b_with_equal_stages_is_the_closed_form(p: int, m: int, forward_s: float, backward_s: float) -> None:
    timeline = simulate_schedule(Schedule.ONE_F_ONE_B, equal_stages(p, forward_s, backward_s), m)
    assert timeline.makespan_s == pytest.approx((m + p - 1) * (forward_s + backward_s))
    assert timeline.bubble_fraction == pytest.approx((p - 1) / m, abs=1e-9)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(2, 5), SECONDS, SECONDS)
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, groups: int, v: int, f: float, b: float) -> None:
    timeline = simulate_schedule(Schedule.INTERLEAVED, equal_stages(p, f, b), groups * p, v)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (v * groups * p), abs=1e-9)


@given(st.integers(1, 10), st.integers(0, 20), SECONDS, st.floats(1, 3), st.floats(0, 1))
def test_zero_bubble_is_qis_closed_form(p: int, more: int, f: float, backward: float, weight_part: float) -> None:
    """(p - 1)(T_F + T_B - T_W), as printed, where weight gradients take no longer than forwards and input gradients."""
    b, w = f * backward, f * weight_part
    m = p + more
    timeline = simulate_schedule(Schedule.ZERO_BUBBLE, PipelineTimes((f,) * p, (b + w,) * p, 0.0, (w,) * p), m)
    assert timeline.makespan_s - m * (f + b + w) == pytest.approx((p - 1) * (f + b - w), abs=1e-6)


@given(st.integers(2, 8), st.integers(1, 20), SECONDS, SECONDS, st.floats(0.05, 0.95))
def test_zero_bubble_is_below_1f1b(p: int, m: int, f: float, backward_s: float, weight_part: float) -> None:
    """With equal stages; no more memory than 1F1B's first stage has."""
    w = backward_s * weight_part
    times = PipelineTimes((f,) * p, (backward_s,) * p, 0.0, (w,) * p)
    split = simulate_schedule(Schedule.ZERO_BUBBLE, times, m)
    whole = simulate_schedule(Schedule.ONE_F_ONE_B, times, m)
    assert split.makespan_s < whole.makespan_s
    assert max(split.peak_in_flight) <= max(whole.peak_in_flight) == min(p, m)


@pytest.mark.parametrize("schedule", Schedule)
def test_the_closed_form_of_each_schedule_is_what_is_simulated(schedule: Schedule) -> None:
    chunks = FEWEST_CHUNKS[schedule.value]
    for stages, micro_batches in ((1, 3), (4, 8), (4, 16), (7, 28)):
        timeline = simulate_schedule(schedule, equal_stages(stages, 1.0, 2.0), micro_batches, chunks)
        expected = bubble_closed_form(schedule, stages, micro_batches, chunks)
        assert timeline.bubble_fraction == pytest.approx(expected, abs=1e-9), (stages, micro_batches)


@given(timelines())
def test_activations_in_flight_are_those_that_memory_is_planned_for(drawn: tuple[Timeline, PipelineTimes]) -> None:
    """1F1B: min(p - s, m). Interleaved, first stage: p + (p - 1) / v (Korthikanti 2022: p (1 + (p - 1) / (p v)))."""
    timeline, _ = drawn
    p, m, v = timeline.stages, timeline.micro_batches, timeline.chunks
    if timeline.schedule is Schedule.ONE_F_ONE_B:
        assert timeline.peak_in_flight == tuple(min(p - stage, m) for stage in range(p))
    elif timeline.schedule is Schedule.INTERLEAVED:
        assert timeline.peak_in_flight[0] == min(p * v + p - 1, m * v)
    elif timeline.schedule is Schedule.ZERO_BUBBLE:
        assert max(timeline.peak_in_flight) == min(p, m)
    elif timeline.schedule is Schedule.ZB_V:
        assert max(timeline.peak_in_flight) == 2 * min(p, m)
    else:
        assert set(timeline.peak_in_flight) == {2 * p + 1}


@given(st.integers(2, 8), st.integers(1, 40), SECONDS, SECONDS, st.floats(0, 1))
def test_1f1b_waits_for_at_most_two_transfers_a_micro_batch(p: int, m: int, f: float, b: float, away: float) -> None:
    """The planner's step time counts f + b + 2 p2p for each of m + p - 1: a ceiling that the simulation comes near to,
    because in steady state each stage waits for its activation and its gradient."""
    travel_s = away * min(f, b)
    timeline = simulate_schedule(Schedule.ONE_F_ONE_B, equal_stages(p, f, b, travel_s), m)
    assert timeline.makespan_s <= (m + p - 1) * (f + b + 2 * travel_s) * (1 + 1e-9)
    assert timeline.makespan_s >= (m + p - 1) * (f + b) + 2 * (p - 1) * travel_s - 1e-6


def test_the_slowest_stage_sets_the_pace() -> None:
    """One micro-batch more costs its time; filling and emptying costs no more than all other stages' once."""
    times = PipelineTimes((1.0, 1.0, 1.5, 1.0), (2.0, 2.0, 3.0, 2.0))
    timeline, longer = (simulate_schedule(Schedule.ONE_F_ONE_B, times, m) for m in (200, 201))
    assert longer.makespan_s - timeline.makespan_s == pytest.approx(4.5)
    assert 200 * 4.5 + 2 * 3.0 < timeline.makespan_s <= 200 * 4.5 + 3 * 3.0


def test_a_large_pipeline_takes_seconds() -> None:
    started = time.perf_counter()
    timeline = simulate_schedule(Schedule.INTERLEAVED, equal_stages(64, 1.0, 2.0), 512, 4)
    assert len(timeline.work) == 64 * 512 * 4 * 2
    assert time.perf_counter() - started < 60  # 1.5 s where nothing else runs, minutes were it quadratic


@pytest.mark.parametrize(
    ("schedule", "times", "micro_batches", "chunks", "words"),
    [
        (Schedule.INTERLEAVED, equal_stages(4, 1, 2), 10, 2, "no multiple of it: use 8"),
        (Schedule.ONE_F_ONE_B, PipelineTimes((1, 1), (2,)), 4, 1, "2 and 1"),
        (Schedule.ONE_F_ONE_B, PipelineTimes((1, -1), (2, 2)), 4, 1, "negative"),
        (Schedule.ZERO_BUBBLE, PipelineTimes((1, 1), (2, 2), 0, (3, 1)), 4, 1, "cannot be longer"),
    ],
)
def test_impossible_pipelines_are_named(
    schedule: Schedule, times: PipelineTimes, micro_batches: int, chunks: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate_schedule(schedule, times, micro_batches, chunks)


def test_a_drawing_shows_the_timeline() -> None:
    timeline = simulate_schedule(Schedule.ONE_F_ONE_B, equal_stages(2, 1.0, 2.0), 2)
    assert draw(timeline, columns=26) == ["stage 0 0-1-....0===..1===", "stage 1 ..0-0===1-1===...."]


def test_a_drawing_shows_each_chunk_of_a_stage() -> None:
    """A line is blank while the other chunk of the stage has the device."""
    timeline = simulate_schedule(Schedule.ZB_V, equal_stages(2, 2.0, 4.0), 3, 2)
    assert draw(timeline, columns=60) == [
        "stage 0 chunk 0 0-1-2-            0<0~      1<1~2<2~..",
        "stage 0 chunk 1       0-0<0~1-1<1~    2-2<2~        ..",
        "stage 1 chunk 0 ..0-  1-      2-0<0~      1<  2<1~  2~",
        "stage 1 chunk 1 ..  0-  1-0<0~      2-1<1~  2<    2~  ",
    ]


@given(timelines(), st.integers(40, 140))
def test_a_drawing_fits_and_shows_every_chunk(drawn: tuple[Timeline, PipelineTimes], columns: int) -> None:
    timeline, _ = drawn
    lines = draw(timeline, columns)
    assert len(lines) == timeline.stages * timeline.chunks
    assert {len(line) for line in lines} == {len(lines[0])} and len(lines[0]) <= columns
    label = len("stage 0 chunk 0 " if timeline.chunks > 1 else "stage 0 ")
    signs = set("".join(line[label:] for line in lines)) - set("0123456789")
    assert signs <= set(legend(timeline))


def test_a_drawing_of_a_large_pipeline_has_no_numbers() -> None:
    timeline = simulate_schedule(Schedule.ONE_F_ONE_B, equal_stages(4, 1.0, 2.0), 300)
    lines = draw(timeline)
    assert all(set(line.split(maxsplit=2)[2]) <= set("-=.") and len(line) == 100 for line in lines)
