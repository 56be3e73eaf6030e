"""The trace of several machines: on one clock, sound by the rules of its format, and with nothing made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.monitor.steps.alignment import align, on_last_clock
from megalite.monitor.steps.chrome_trace import chrome_trace
from megalite.monitor.steps.message_pairs import message_pairs
from megalite.monitor.steps.timeline import RankTimeline
from megalite.schedules.simulation import PipelineTimes, simulate_schedule
from megalite.schedules.tables import Schedule
from megalite.tracing.activity import Operation
from megalite.tracing.tape import Collective
from tests.helpers.simulated_ranks import ranks_of
from tests.helpers.sound_trace import check_sound


def _ranks(schedule: Schedule = Schedule.ONE_F_ONE_B, step: int = 10, boot: str = "1f") -> dict[int, RankTimeline]:
    times = PipelineTimes([1e-3] * 4, [2e-3] * 4)
    return ranks_of(simulate_schedule(schedule, times, 8, FEWEST_CHUNKS[schedule.value]), step, boot)


def _elsewhere(timeline: RankTimeline, ahead_s: float, late_s: float = 0.0) -> RankTimeline:
    """The timeline as another machine would have recorded it; two of its meetings were left late."""
    meetings = {step: time + ahead_s + late_s * (step in (2, 3)) for step, time in timeline.meetings.items()}
    return replace(
        timeline,
        owner=timeline.owner.model_copy(update={"boot": "another"}),
        ended=timeline.ended + ahead_s,
        notes=[note._replace(time=note.time + ahead_s) for note in timeline.notes],
        collectives=[each._replace(began=each.began + ahead_s) for each in timeline.collectives],
        meetings=meetings,
    )


@pytest.mark.parametrize("schedule", Schedule)
def test_a_trace_of_any_schedule_is_sound(schedule: Schedule) -> None:
    ranks = _ranks(schedule)
    trace = chrome_trace([ranks])
    assert check_sound(trace.events) == trace.arrows == len(list(message_pairs(ranks))) > 0
    names = {e["pid"]: e["args"]["name"] for e in trace.events if e["name"] == "process_name"}
    assert names[2] == "stage 2, rank 2 (node2)"
    json.dumps(trace.events, allow_nan=False)


def test_an_arrow_leads_from_the_send_to_the_reception_of_the_same_message() -> None:
    """Stage 1's forward of micro-batch 3 needs what stage 0 sent, not what it sent for another one."""
    ranks = _ranks()
    sent = [n.time for n in ranks[0].notes if n.operation is Operation.SEND_ACTIVATION and n.micro_batch == 3]
    begun = [n.time for n in ranks[1].notes if n.operation is Operation.FORWARD and n.micro_batch == 3]
    trace = chrome_trace([ranks])
    zero_s = min(each.began for each in ranks.values())
    ends = [e for e in trace.events if e["ph"] in "sf" and e["args"]["micro_batch"] == 3 and e["name"] == "activation"]
    (first, second) = sorted((e for e in ends if e["args"]["position"] == 1), key=lambda e: e["ph"], reverse=True)
    assert (first["ph"], first["pid"], second["pid"]) == ("s", 0, 1)
    assert first["ts"] == pytest.approx((sent[0] - zero_s) * 1e6, abs=0.01)
    assert second["ts"] == pytest.approx((begun[0] - zero_s) * 1e6, abs=0.01)


def test_clocks_of_machines_are_compared_by_their_meetings() -> None:
    """A mean would be wrong by the two meetings that were left late; ranks of one boot keep their times to the bit."""
    ranks = _ranks()
    moved = ranks | {rank: _elsewhere(ranks[rank], 1234.5, late_s=0.3) for rank in (2, 3)}
    aligned = align(list(moved.values()))
    assert aligned.met == {"another": 10} and not aligned.unmet
    for rank, timeline in aligned.timelines.items():
        assert [n.time for n in timeline.notes] == pytest.approx([n.time for n in ranks[rank].notes], abs=1e-9)
    assert aligned.timelines[1] is ranks[1], "as it is"
    trace = chrome_trace([aligned.timelines])
    assert check_sound(trace.events) == trace.arrows and trace.left_out == 0


def test_without_a_common_meeting_the_time_of_day_decides() -> None:
    ranks = _ranks()
    stranger = replace(_elsewhere(ranks[3], 77.0), meetings={999: 1.0})
    aligned = align([*(ranks[rank] for rank in range(3)), stranger])
    assert aligned.unmet == {"node3"} and not aligned.met
    assert aligned.timelines[3].began == pytest.approx(ranks[3].began, abs=1e-6)


def test_an_arrow_that_would_lead_backwards_is_left_out() -> None:
    """Clocks that are 5 ms apart must not show effects before their causes."""
    ranks = _ranks()
    early = replace(ranks[3], notes=[n._replace(time=n.time - 5e-3) for n in ranks[3].notes])
    trace = chrome_trace([ranks | {3: early}])
    assert trace.left_out == 8 and 3e-3 < trace.most_s <= 5e-3, "activations that stage 3 had before they were sent"
    assert check_sound(trace.events) == trace.arrows == 6 * 8 - 8


def test_steps_before_a_restart_elsewhere_come_first() -> None:
    """The clock of the new machine began later; the time of day tells that the first step was a minute before."""
    first, second = _ranks(step=10, boot="old"), _ranks(step=20, boot="new")
    second = {rank: replace(each, unix=each.unix + 60.0) for rank, each in second.items()}
    before, after = on_last_clock([align(list(first.values())), align(list(second.values()))])
    assert after[0].began - before[0].began == pytest.approx(60.0, abs=1e-6)
    trace = chrome_trace([before, after])
    assert check_sound(trace.events) == trace.arrows == 2 * 48


def test_collectives_that_overlap_have_tracks_of_their_own_and_events_are_marks() -> None:
    ranks = _ranks()
    began = ranks[0].began
    collectives = [
        Collective(began + 0.125, 0.25, "tensor", "all_reduce", 64),
        Collective(began + 0.25, 0.25, "data", "reduce_scatter", 128),
        Collective(began + 0.375, 0.125, "tensor", "all_gather", 32),
    ]
    ranks[0] = replace(ranks[0], collectives=collectives)
    events = [{"event": "saved", "time": began + 0.25, "step": 10, "bytes": float("nan")}]
    trace = chrome_trace([ranks], events)
    check_sound(trace.events)
    spans = {e["name"]: e for e in trace.events if e["ph"] == "X" and "axis" in e["args"]}
    assert spans["tensor all_gather"]["tid"] == spans["tensor all_reduce"]["tid"] != spans["data reduce_scatter"]["tid"]
    (mark,) = (e for e in trace.events if e["ph"] == "i")
    assert (mark["name"], mark["s"]) == ("saved", "g") and mark["ts"] == pytest.approx(250_000, abs=0.01)
    json.dumps(trace.events, allow_nan=False)


def test_ranks_without_a_record_lose_their_arrows_alone() -> None:
    ranks = _ranks()
    del ranks[1]
    trace = chrome_trace([ranks])
    assert check_sound(trace.events) == trace.arrows == 2 * 8, "between stages 2 and 3"
