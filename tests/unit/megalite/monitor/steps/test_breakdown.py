"""What rank 0 makes of the rows of all ranks, and which ranks it calls slow."""

from __future__ import annotations

import json
import random
from statistics import median

import numpy as np
import pytest

from megalite.monitor.steps.breakdown import COLUMN, KINDS, ROW, StepBreakdown
from megalite.monitor.steps.parts import OWN_WORK, PARTS
from megalite.monitor.steps.slow_ranks import IN_A_ROW, WINDOW, SlowRank, SlowRanks, relative_speeds

STAGES = [0, 0, 1, 1]


def _rows(steps: int = 2) -> np.ndarray:
    """Two stages of two ranks; rank 2 has the most own work, and the clocks of stage 1 are 1000 s ahead."""
    rows = np.zeros((4, len(ROW)))
    for rank, row in enumerate(rows):
        row[COLUMN["steps"]] = steps
        for number, part in enumerate(PARTS):
            row[COLUMN[part]] = steps * (number + rank * (part in OWN_WORK))
        row[COLUMN["wall_s"]] = row[COLUMN["data"] : COLUMN["other"] + 1].sum()
        ahead = 1000.0 * STAGES[rank]
        row[COLUMN["began"]], row[COLUMN["ended"]] = 5.0 + rank + ahead, 15.0 + rank + ahead
        row[COLUMN["busy_s"]] = 6.5
        row[COLUMN["tensor all_reduce calls"]] = steps * 24
        row[COLUMN["tensor all_reduce bytes"]] = steps * 4096.0
    rows[2, COLUMN["forward"]] += 100.0
    rows[2, COLUMN["wall_s"]] += 100.0
    return rows


def test_a_breakdown_is_per_step_and_adds_up() -> None:
    found = StepBreakdown.of(10, _rows(), STAGES, [0.0, 0.0, 1000.0, 1000.0])
    assert sum(found.parts_s.values()) == pytest.approx(found.wall_s, abs=1e-9)
    assert found.parts_s["data"] == 0 and found.parts_s["forward"] == pytest.approx(2 + 1.5 + 100 / 2 / 4)
    first, second = found.stages
    assert (first.slowest_rank, second.slowest_rank) == (1, 2)
    assert second.max_s["forward"] == pytest.approx(2 + 2 + 50) and second.mean_s["backward"] == pytest.approx(3 + 2.5)
    assert first.idle_ratio == second.idle_ratio == pytest.approx(1 - 6.5 / 13.0), "from rank 0's begin to rank 3's end"
    (communication,) = first.communication
    assert (communication.axis, communication.operation) == ("tensor", "all_reduce")
    assert (communication.calls, communication.bytes) == (24, 4096)
    assert {"wall_s", "parts_s", "communication_share"} == found.record().keys()
    assert sum(found.record()["parts_s"].values()) == pytest.approx(found.record()["wall_s"], abs=1e-6)
    json.dumps(found.line(), allow_nan=False)


def test_without_stages_nothing_is_said_about_a_pipeline() -> None:
    found = StepBreakdown.of(1, _rows(), [0] * 4, [0.0] * 4)
    assert [stage.idle_ratio for stage in found.stages] == [None]


def test_ranks_that_could_not_record_their_step_break_nothing() -> None:
    found = StepBreakdown.of(1, np.zeros((4, len(ROW))), STAGES, [0.0] * 4)
    assert found.wall_s == 0 and found.record()["communication_share"] == 0
    json.dumps(found.line(), allow_nan=False)


def test_a_rank_that_has_missed_a_step_counts_with_those_that_it_has() -> None:
    rows = _rows()
    rows[0] /= 2  # one step of two, as long as the others' steps
    assert StepBreakdown.of(10, rows, STAGES, [0.0] * 4).steps == 2
    whole, found = (StepBreakdown.of(10, each, STAGES, [0.0] * 4) for each in (_rows(), rows))
    assert found.wall_s == pytest.approx(whole.wall_s) and found.parts_s == pytest.approx(whole.parts_s)
    assert found.stages[0].communication == whole.stages[0].communication


def test_a_rank_without_a_record_is_neither_slow_nor_the_measure_of_others() -> None:
    ranks = SlowRanks([0, 0, 0], ["a", "b", "c"])
    assert not any(_windows(ranks, [1.0, 1.0, float("inf")], IN_A_ROW)), "1 / inf is no time at all"
    assert not any(_windows(SlowRanks([0, 0], ["a", "b"]), [1.0, float("inf")], IN_A_ROW))


def test_the_columns_of_communication_are_the_last_ones() -> None:
    assert ROW[-3 * len(KINDS) :][:3] == tuple(f"tensor all_reduce {what}" for what in ("calls", "bytes", "seconds"))
    assert ROW[COLUMN["data"] : COLUMN["other"] + 1] == tuple(PARTS)


def _windows(ranks: SlowRanks, speeds: list[float], count: int, steps: int = 10) -> list[list[SlowRank]]:
    """What is said after each of `count` windows in which ranks have these speeds."""
    said = []
    for _ in range(count):
        changes = []
        for _ in range(WINDOW // steps):
            forward, backward = ([work * steps / speed for speed in speeds] for work in (1.0, 2.0))
            changes += ranks.add(steps, {"forward": forward, "backward": backward})
        said.append(changes)
    return said


def test_a_rank_that_is_a_third_slower_than_its_like_is_named_and_no_other() -> None:
    """The ranks of stage 1 have other work, which says nothing about them."""
    ranks = SlowRanks([0, 0, 0, 1, 1], ["a", "b", "c", "d", "e"])
    assert not any(_windows(ranks, [1.0, 1.03, 0.97, 0.2, 0.2], 4))
    *before, named = _windows(ranks, [1.0, 1.03, 0.7, 0.2, 0.2], IN_A_ROW)
    assert not any(before)
    (change,) = named
    assert (change.rank, change.stage, change.host, change.is_over) == (2, 0, "c", False)
    assert change.relative_speed == pytest.approx(0.7 / 1.015, rel=0.01)
    assert "rank 2" in change.sentence() and "host c" in change.sentence() and "69%" in change.sentence()
    assert not any(_windows(ranks, [1.0, 1.03, 0.7, 0.2, 0.2], 5)), "once is enough"
    ((over,),) = _windows(ranks, [1.0, 1.0, 1.0, 0.2, 0.2], 1)
    assert over.is_over and over.rank == 2


def test_of_two_ranks_the_slower_one_is_named() -> None:
    (*_, named) = _windows(SlowRanks([0, 0], ["a", "b"]), [1.0, 0.77], IN_A_ROW)
    assert [change.rank for change in named] == [1]


def test_one_slow_window_is_nothing_and_a_rank_alone_has_nobody_to_be_compared_with() -> None:
    ranks = SlowRanks([0, 0], ["a", "b"])
    for speed in (0.5, 0.5, 1.0, 0.5, 0.5, 1.0):
        assert not any(_windows(ranks, [1.0, speed], 1))
    assert not any(_windows(SlowRanks([0, 1], ["a", "b"]), [1.0, 0.1], 9))


def test_the_part_that_is_behind_is_named() -> None:
    ranks, changes = SlowRanks([0, 0], ["a", "b"]), []
    for _ in range(IN_A_ROW):
        changes += ranks.add(WINDOW, {"forward": [1.0, 5.0], "backward": [2.0, 2.0]})
    assert [change.part for change in changes] == ["forward"]


def test_speeds_are_relative_to_the_others_of_a_stage() -> None:
    """Against a median written down again, for odd and even numbers of ranks, with equal times among them."""
    chance = random.Random(3)
    for ranks in range(1, 40):
        stages = [chance.randrange(3) for _ in range(ranks)]
        own = [chance.choice([0.0, 1.0, 1.0, 2.0, chance.random()]) for _ in range(ranks)]
        expected = {}
        for rank in range(ranks):
            others = [own[one] for one in range(ranks) if one != rank and stages[one] == stages[rank] and own[one] > 0]
            if others and own[rank] > 0:
                expected[rank] = median(others) / own[rank]
        assert relative_speeds(own, stages) == pytest.approx(expected)


def test_thousands_of_ranks_are_compared_without_a_comparison_of_each_with_each() -> None:
    """Rank 0 does so while all others wait: 6,000 ranks of one stage once took half a minute."""
    ranks = SlowRanks([0] * 6_000, [""] * 6_000)
    own = {part: [1.0] * 5_999 + [2.0] for part in OWN_WORK}
    *_, named = (ranks.add(WINDOW, own) for _ in range(IN_A_ROW))
    assert [(one.rank, one.relative_speed) for one in named] == [(5_999, 0.5)]
