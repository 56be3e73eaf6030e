"""A step taken apart: fed with the planner's own simulations, whose bubble, imbalance and idle time are known."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.monitor.steps.pipeline_parts import mean_parts, parts_by_rank, pipeline_parts, simulated_s
from megalite.monitor.steps.timeline import RankTimeline
from megalite.schedules.simulation import PipelineTimes, Timeline, bubble_closed_form, simulate_schedule
from megalite.schedules.tables import Schedule
from megalite.tracing.activity import Operation, Phase
from tests.helpers.simulated_ranks import ranks_of

EXACT = 1e-9
CASES = [
    (Schedule.INTERLEAVED, 4, 8, 3),
    (Schedule.ZERO_BUBBLE, 4, 8, 1),
    (Schedule.ZB_V, 4, 8, 2),
    (Schedule.DUALPIPE_V, 4, 9, 2),
]


def _equal(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> Timeline:
    return simulate_schedule(schedule, PipelineTimes([1.0] * stages, [2.0] * stages), micro_batches, chunks)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 32)])
def test_the_bubble_of_1f1b_is_the_closed_form(stages: int, micro_batches: int) -> None:
    """Idle over span and idle over work, which are often taken for each other."""
    found = pipeline_parts(ranks_of(_equal(Schedule.ONE_F_ONE_B, stages, micro_batches, 1)))
    assert found is not None
    of_span, over_work = (stages - 1) / (micro_batches + stages - 1), (stages - 1) / micro_batches
    assert found.own_idle_of_span == pytest.approx(of_span, abs=EXACT)
    assert found.idle_of_span == pytest.approx(of_span, abs=EXACT), "nothing else keeps stages idle"
    assert found.own_idle_over_work == pytest.approx(over_work, abs=EXACT)
    assert found.idle_over_work == pytest.approx(over_work, abs=EXACT)
    assert found.bubble_s == pytest.approx(3.0 * (stages - 1), abs=EXACT)
    for part in (found.imbalance_s, found.transfers_s, found.jitter_s, found.straggler.excess_s):
        assert part == pytest.approx(0.0, abs=EXACT)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), CASES, ids=str)
def test_other_schedules_have_the_simulated_bubble(
    schedule: Schedule, stages: int, micro_batches: int, chunks: int
) -> None:
    """DualPipeV with whole backwards and such in two parts side by side; none but exact numbers pass."""
    timeline = _equal(schedule, stages, micro_batches, chunks)
    found = pipeline_parts(ranks_of(timeline))
    assert found is not None
    assert found.span_s == pytest.approx(timeline.makespan_s, abs=EXACT)
    assert found.own_idle_over_work == pytest.approx(timeline.bubble_fraction, abs=EXACT)
    assert found.idle_over_work == pytest.approx(timeline.bubble_fraction, abs=EXACT)
    assert found.jitter_s == pytest.approx(0.0, abs=EXACT)
    if schedule is not Schedule.DUALPIPE_V:
        form = bubble_closed_form(schedule, stages, micro_batches, chunks)
        assert found.own_idle_over_work == pytest.approx(form, abs=EXACT)
    assert [stage.forward_s for stage in found.stages] == pytest.approx([1.0] * stages)
    assert [stage.backward_s for stage in found.stages] == pytest.approx([2.0] * stages)


@pytest.mark.parametrize("schedule", Schedule)
def test_a_slow_stage_is_imbalance_and_nothing_else(schedule: Schedule) -> None:
    chunks = FEWEST_CHUNKS[schedule.value]
    slow = PipelineTimes([1.0, 1.0, 1.5, 1.0], [2.0, 2.0, 3.0, 2.0])
    timeline = simulate_schedule(schedule, slow, 8, chunks)
    found = pipeline_parts(ranks_of(timeline))
    assert found is not None
    even = simulate_schedule(schedule, PipelineTimes([1.125] * 4, [2.25] * 4), 8, chunks)
    assert found.bubble_s == pytest.approx(even.makespan_s - 8 * 3.375, abs=EXACT)
    assert found.imbalance_s == pytest.approx(timeline.makespan_s - even.makespan_s, abs=EXACT)
    assert found.imbalance_s > 0.7 * 8 * (4.5 - 3.375), "nearly every micro-batch waits for the slow stage"
    assert found.jitter_s == pytest.approx(0.0, abs=EXACT)
    assert found.slowest_stage.stage == 2 and found.slowest_over_mean == pytest.approx(4.5 / 3.375)


@pytest.mark.parametrize("schedule", Schedule)
def test_parts_add_up_whatever_the_stages_take(schedule: Schedule) -> None:
    times = PipelineTimes([1.0, 0.25, 2.0], [2.0, 3.0, 1.0], weight_gradient_s=[0.5, 1.0, 0.5])
    ranks = ranks_of(simulate_schedule(schedule, times, 6, FEWEST_CHUNKS[schedule.value]))
    found = pipeline_parts(ranks)
    assert found is not None and sum(found.parts_s.values()) == pytest.approx(found.span_s, abs=EXACT)
    for rank, parts in parts_by_rank(ranks).items():
        assert sum(parts.values()) == pytest.approx(ranks[rank].ended - ranks[rank].began, abs=EXACT)
        assert parts["pipeline_transfer"] == pytest.approx(0.0, abs=EXACT), "a message takes no time here"
    assert mean_parts(ranks)["pipeline_wait"] > 0
    json.dumps(asdict(found), allow_nan=False)


def _later(timeline: RankTimeline, since: float, seconds: float) -> RankTimeline:
    """What happens from a time on happens later, so that what was under way then lasts longer."""
    notes = [note._replace(time=note.time + seconds * (note.time >= since)) for note in timeline.notes]
    return replace(timeline, ended=timeline.ended + seconds, notes=notes)


def test_a_message_on_its_way_is_a_transfer_and_a_single_long_pass_is_jitter() -> None:
    """A slow network must not be taken for a bubble, nor garbage collection for a slow stage."""
    ranks = ranks_of(_equal(Schedule.ONE_F_ONE_B, 2, 4, 1))
    # the last gradient reaches the first stage 0.3 s after it was sent, at 15 - 2 s
    sent = max(n.time for n in ranks[1].notes if n.operation is Operation.SEND_GRADIENT)
    found = pipeline_parts(ranks | {0: _later(ranks[0], sent, 0.3)})
    assert found is not None
    assert found.transfers_s == pytest.approx(0.3 / 2, abs=EXACT), "of two ranks one was blocked"
    assert found.bubble_s == pytest.approx(3.0, abs=EXACT) and found.imbalance_s == pytest.approx(0.0, abs=EXACT)
    last = max(n.time for n in ranks[0].notes if n.operation is Operation.BACKWARD)
    found = pipeline_parts(ranks | {0: _later(ranks[0], last + 1.0, 0.7)})
    assert found is not None
    assert found.jitter_s == pytest.approx(0.7, abs=EXACT) and found.transfers_s == pytest.approx(0.0, abs=EXACT)
    assert (found.straggler.rank, found.straggler.host) == (0, "node0")
    assert found.straggler.excess_s == pytest.approx(0.7, abs=EXACT)


def test_evaluations_and_reductions_within_a_pass_change_nothing() -> None:
    """A pass that begins a reduction is recorded in two pieces; an evaluation has forwards of the same numbers."""
    ranks = ranks_of(_equal(Schedule.ONE_F_ONE_B, 2, 4, 1))
    plain = pipeline_parts(ranks)
    backward = next(n for n in ranks[0].notes if n.operation is Operation.BACKWARD)
    within = [
        backward._replace(time=backward.time + 0.5, operation=Operation.REDUCE_GRADIENTS, micro_batch=1),
        backward._replace(time=backward.time + 0.6),
    ]
    forward = next(n for n in ranks[0].notes if n.operation is Operation.FORWARD)
    after = ranks[0].ended - 0.125
    evaluation = [forward._replace(time=after, phase=Phase.EVALUATION, phase_number=9)]
    notes = sorted([*ranks[0].notes, *within, *evaluation], key=lambda note: note.time)
    assert pipeline_parts(ranks | {0: replace(ranks[0], notes=notes)}) == plain


def test_a_model_without_stages_has_no_bubble() -> None:
    ranks = ranks_of(_equal(Schedule.ONE_F_ONE_B, 1, 4, 1))
    assert pipeline_parts(ranks) is None
    parts = mean_parts(ranks)
    assert parts["forward"] == pytest.approx(4.0) and parts["backward"] == pytest.approx(8.0)
    assert parts["pipeline_wait"] == 0


def test_a_step_that_is_not_whole_is_refused() -> None:
    ranks = ranks_of(_equal(Schedule.ONE_F_ONE_B, 2, 4, 1))
    with pytest.raises(ValueError, match="no timeline of stage 1"):
        pipeline_parts({0: ranks[0]})
    with pytest.raises(ValueError, match="rank 1 recorded 4 forward and 3 backward passes"):
        pipeline_parts(ranks | {1: replace(ranks[1], notes=ranks[1].notes[:-3])})
    still = [note._replace(time=1.0) for note in ranks[0].notes]
    with pytest.raises(ValueError, match="took no time"):
        pipeline_parts({rank: replace(each, notes=still, ended=1.0) for rank, each in ranks.items()})


def test_another_schedule_of_the_same_stages_is_what_the_planner_says() -> None:
    """Only one that cuts the model in the same way: nobody has measured the stages of another cut."""
    found = pipeline_parts(ranks_of(_equal(Schedule.ONE_F_ONE_B, 4, 8, 1)))
    assert found is not None
    simulated = {schedule: simulated_s(found, schedule) for schedule in Schedule}
    assert simulated[Schedule.ONE_F_ONE_B] == pytest.approx(33.0)
    assert simulated[Schedule.ZERO_BUBBLE] == pytest.approx(27.0)
    assert {schedule for schedule, seconds in simulated.items() if seconds is None} == {
        Schedule.INTERLEAVED,
        Schedule.ZB_V,
        Schedule.DUALPIPE_V,
    }
    folded = pipeline_parts(ranks_of(_equal(Schedule.ZB_V, 4, 8, 2)))
    assert folded is not None and simulated_s(folded, Schedule.DUALPIPE_V) is not None
    assert simulated_s(folded, Schedule.INTERLEAVED) is None
