"""Every number that the worked example prints comes out, and every contradiction is told with its number."""

from __future__ import annotations

import json

import pytest

from benchmarks.planner import scaling_tutorial as tutorial

SCALE = """
8 1 4285.7 0.2 12.0
32 4 1071.4 0.7 6.0
64 8 535.7 1.3 4.2
128 16 267.9 2.7 3.0
256 32 133.9 5.4 2.1
512 64 67.0 10.8 1.5
1024 128 33.5 21.5 1.1
"""
LOSSES = """
64 5.8 9.5 1.6
256 61.3 19.0 0.3
512 69.2 26.9 0.4
1024 73.1 38.1 0.5
"""
STEPS = """
8 19.6 99.7
32 49.0 99.3
64 53.9 99.2
128 441.3 93.8
256 617.8 91.5
512 706.1 90.4
1024 750.3 89.9
"""


def test_the_table_of_failures_is_as_printed() -> None:
    ours = [
        f"{row.gpus} {row.nodes} {row.mtbf_hours:.1f} {row.failures:.1f} {row.interval_hours:.1f}"
        for row in tutorial.scale_table()
    ]
    assert ours == SCALE.split("\n")[1:-1]


def test_the_table_of_losses_is_as_printed() -> None:
    ours = [
        f"{row.gpus} {row.communication_hours:.1f} {row.checkpoint_hours:.1f} {row.ratio:.1f}"
        for row in tutorial.loss_table()
    ]
    assert ours == LOSSES.split("\n")[1:-1]


def test_the_sweep_of_steps_is_as_printed() -> None:
    ours = [f"{row.gpus} {row.communication_s * 1000:.1f} {100 * row.efficiency:.1f}" for row in tutorial.sweep_table()]
    assert ours == STEPS.split("\n")[1:-1] and tutorial.COMPUTE_S == 6.6428


def test_the_checkpoint_is_as_printed() -> None:
    assert f"{tutorial.CHECKPOINT_BYTES / 1e9:.1f}" == "988.4"
    assert f"{tutorial.CHARGED_SAVE.duration_s:.1f}" == "141.2"
    assert f"{tutorial.CHARGED_SAVE.duration_s / 3600:.2%}" == "3.92%"
    assert f"{tutorial.COMPONENTS.mttf_hours:.1f}" == "4285.7"


@pytest.mark.parametrize(
    "words", ["16.74 h, 43.0 failures", "equal", "33.5 to 50.95 h, 1.52x, not 2x", "779 GPUs", "72.37%"]
)
def test_the_exercises_have_the_printed_answers(words: str) -> None:
    assert sum(words in exercise.answer for exercise in tutorial.exercises()) == 1


def test_the_swept_optimum_is_young_s_interval() -> None:
    assert tutorial.swept_interval_s(512) == pytest.approx(tutorial.scale_row(512).interval_hours * 3600, abs=1.0)


@pytest.mark.parametrize(
    "words",
    [
        "cost less from 256 GPUs up, 19.0 h against 61.3 h",
        "38.1 h of 720 h, 5.3%, not 10-30%",
        "the interval is 97 min, not 63, and 34.9 h are lost, not 38.1 h",
        "2.0 s on storage of 500 GB/s and lose 0.57% (1.1 s and 0.43%",
        *("efficiency at 1,024 GPUs is 63% (62.9% with 65,536", "without FLOPs", "no all-reduces of activations"),
        *("(p-1)/m", "Restarts are left out", "MTTF is 4,687.5 h, not 4,285.7 h"),
        *("549.1 ms, efficiency 92.4%, not 99.3%", "776 (67.2 h) or 784 (66.5 h)", "5.6 per 1,000 node-days"),
    ],
)
def test_each_contradiction_is_told_with_its_number(words: str) -> None:
    assert sum(words in sentence for sentence in tutorial.contradictions()) == 1


def test_contradictions_are_sentences() -> None:
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in tutorial.contradictions())


def test_the_stored_answer_is_the_computed_one() -> None:
    """Catches a formula that was changed without `python -m benchmarks.planner.scaling_tutorial`."""
    assert json.loads(tutorial.TUTORIAL.read_text()) == tutorial.answer()
